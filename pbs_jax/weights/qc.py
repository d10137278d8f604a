"""`pbs weights import qc`: the DenseNet121 tile-quality network, from its Keras SavedModel or from npz / safetensors.

The released SavedModel needs TensorFlow (extra `qc`) once; what is written needs none. Arrays may have Keras's names
(`conv2_block1_1_conv/kernel`) or torchvision's (`features.denseblock1.denselayer1.conv1.weight`, with hidden.* and out.*).
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from data_prep.schema import DataError
from pbs_jax.models.densenet import DenseNet, DenseNetConfig
from pbs_jax.train import handover
from pbs_jax.train.phase import definition
from pbs_jax.weights.convert import to_flax
from pbs_jax.weights.importers import Imported, abstract
from pbs_jax.weights.source import Source, held, open_source
from pbs_jax.weights.tables import Row, Table, linear

STATISTICS = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
KERAS_STATISTICS = {"scale": "gamma", "bias": "beta", "mean": "moving_mean", "var": "moving_variance"}


def densenet_table(config: DenseNetConfig) -> Table:
    """torchvision's names, and hidden.*, out.* for the head."""
    rows: list[Row] = []

    def norm(torch: str, flax: str) -> None:
        rows.extend(Row(f"{torch}.{name}", f"{flax}/{ours}") for ours, name in STATISTICS.items())

    def conv(torch: str, flax: str) -> None:
        rows.append(Row(f"{torch}.weight", f"{flax}/kernel", "conv"))

    conv("features.conv0", "conv0")
    norm("features.norm0", "norm0")
    for b, layers in enumerate(config.blocks):
        for i in range(layers):
            torch, flax = f"features.denseblock{b + 1}.denselayer{i + 1}", f"blocks/block{b}/layer{i}"
            for k in (1, 2):
                norm(f"{torch}.norm{k}", f"{flax}/norm{k}")
                conv(f"{torch}.conv{k}", f"{flax}/conv{k}")
        if b < len(config.blocks) - 1:
            norm(f"features.transition{b + 1}.norm", f"transitions/block{b}/norm")
            conv(f"features.transition{b + 1}.conv", f"transitions/block{b}/conv")
    norm("features.norm5", "norm_last")
    rows += [*linear("hidden", "hidden"), *linear("out", "out")]
    return Table(tuple(rows), (r".*num_batches_tracked",))


def keras_table(config: DenseNetConfig) -> Table:
    """Keras's names: kernels lie as ours do."""
    rows: list[Row] = []

    def norm(keras: str, flax: str) -> None:
        rows.extend(Row(f"{keras}/{name}", f"{flax}/{ours}") for ours, name in KERAS_STATISTICS.items())

    rows.append(Row("conv1_conv/kernel", "conv0/kernel"))
    norm("conv1_bn", "norm0")
    for b, layers in enumerate(config.blocks):
        for i in range(layers):
            keras, flax = f"conv{b + 2}_block{i + 1}", f"blocks/block{b}/layer{i}"
            norm(f"{keras}_0_bn", f"{flax}/norm1")
            rows.append(Row(f"{keras}_1_conv/kernel", f"{flax}/conv1/kernel"))
            norm(f"{keras}_1_bn", f"{flax}/norm2")
            rows.append(Row(f"{keras}_2_conv/kernel", f"{flax}/conv2/kernel"))
        if b < len(config.blocks) - 1:
            norm(f"pool{b + 2}_bn", f"transitions/block{b}/norm")
            rows.append(Row(f"pool{b + 2}_conv/kernel", f"transitions/block{b}/conv/kernel"))
    norm("bn", "norm_last")
    for name in ("hidden", "out"):
        rows += [Row(f"{name}/kernel", f"{name}/kernel"), Row(f"{name}/bias", f"{name}/bias")]
    return Table(tuple(rows))


def keras_name(name: str) -> str:
    """A Keras variable's name without models around it, TensorFlow's ":0" and slashes inside a layer's name."""
    name = re.sub(r":\d+$", "", name)
    found = re.search(r"((?:conv\d+|pool\d+|bn)[\w/]*/(?:kernel|gamma|beta|moving_mean|moving_variance))$", name)
    name = found[1] if found else name
    return re.sub(r"^conv1/(conv|bn)/", r"conv1_\1/", name)


def qc(path: Path) -> Imported:
    """`path`: a SavedModel folder, an .npz or a .safetensors file. Raises DataError."""
    source = savedmodel(path) if (path / "saved_model.pb").is_file() else open_source(path)
    if "features.conv0.weight" not in source:
        source, _ = source.renamed(keras_name)
        source, _ = source.renamed(_head_names(source.shapes).get)
    config = densenet_shape(source.shapes)
    keras = "conv1_conv/kernel" in source
    tree = to_flax(source, (keras_table if keras else densenet_table)(config), abstract(_make(config)))
    facts = {"densenet": dataclasses.asdict(config), "datasets": {}, "size": ""}
    return Imported("qc", {"densenet": tree}, facts, source)


def savedmodel(path: Path) -> Source:
    """The variables of a Keras SavedModel. Raises DataError without TensorFlow."""
    try:
        tensorflow = importlib.import_module("tensorflow")
    except ModuleNotFoundError as error:
        raise DataError(
            f'{path} is a SavedModel, which only TensorFlow reads: `pip install "pbs-jax[qc]"`, or convert it to npz there'
        ) from error
    variables = getattr(tensorflow.saved_model.load(str(path)), "variables", None)
    if not variables:
        raise DataError(
            f"{path} tells no variables: save it with Keras (model.save or model.export), or convert it to npz"
        )
    arrays = {str(variable.name): np.asarray(variable.numpy()) for variable in variables}
    return held(arrays, path / "saved_model.pb")


def _head_names(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Keras counts dense layers through a session (dense_7), so the head is told by its shapes."""
    names = {name: name for name in shapes}
    dense = [name for name, shape in shapes.items() if name.endswith("/kernel") and len(shape) == 2]
    if len(dense) != 2:
        raise DataError(f"a QC network has two dense layers, this file {len(dense)}: {', '.join(sorted(shapes)[:6])}")
    for name in dense:
        ours = "out" if shapes[name][1] == 1 else "hidden"
        names[name] = f"{ours}/kernel"
        names[name.removesuffix("kernel") + "bias"] = f"{ours}/bias"
    return names


def densenet_shape(shapes: Mapping[str, tuple[int, ...]]) -> DenseNetConfig:
    """Blocks, widths and the head's width as the tensors say them. Raises DataError when it is no DenseNet."""
    keras = "conv1_conv/kernel" in shapes
    layer = (
        r"conv(\d+)_block(\d+)_2_conv/kernel" if keras else r"features\.denseblock(\d+)\.denselayer(\d+)\.conv2\.weight"
    )
    found = [(int(m[1]), int(m[2]), name) for name in shapes if (m := re.fullmatch(layer, name))]
    head = "hidden/kernel" if keras else "hidden.weight"
    if not found or head not in shapes:
        raise DataError(f"this is no DenseNet with a hidden layer: its tensors are {', '.join(sorted(shapes)[:6])}")
    kernel = shapes[found[0][2]]
    growth, middle = (kernel[3], kernel[2]) if keras else (kernel[0], kernel[1])
    counts = [max(i for block, i, _ in found if block == b) for b in sorted({b for b, _, _ in found})]
    return DenseNetConfig(
        hidden=shapes[head][1 if keras else 0],
        blocks=tuple(counts),
        growth=growth,
        stem=shapes["conv1_conv/kernel"][3] if keras else shapes["features.conv0.weight"][0],
        bottleneck=middle // growth,
    )


def load_qc(workdir: Path) -> tuple[Any, Any]:
    """(definition, parameters) of an imported QC network. Raises DataError."""
    facts = handover.read(workdir, ("qc",))["facts"]["densenet"]
    config = DenseNetConfig(**{**facts, "blocks": tuple(facts["blocks"])})
    return definition(lambda rngs: DenseNet(config, rngs=rngs)), handover.load(workdir, ["densenet"])["densenet"]


def _make(config: DenseNetConfig) -> Any:
    return lambda: DenseNet(config, rngs=nnx.Rngs(0))
