"""The QC network against torchvision's DenseNet, and its two ways in: torchvision's names and Keras's."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_prep.schema import DataError
from pbs_jax.models.densenet import DenseNet, DenseNetConfig
from pbs_jax.train import handover
from pbs_jax.train.phase import definition
from pbs_jax.train.state import leaves_by_name
from pbs_jax.weights.convert import to_flax, to_torch
from pbs_jax.weights.importers import import_weights
from pbs_jax.weights.qc import densenet_table, keras_name, keras_table, load_qc, qc
from tests.models.golden import close, run
from tests.weights.conftest import random_tree

TINY = DenseNetConfig(hidden=5, blocks=(2, 1), growth=4, stem=6)


@pytest.fixture(scope="module")
def tree() -> Any:
    return _positive(random_tree(lambda rngs: DenseNet(TINY, rngs=rngs), 3))


def _positive(node: Any) -> Any:
    return {
        name: np.abs(value) + 0.1 if name == "var" else _positive(value) if isinstance(value, dict) else value
        for name, value in node.items()
    }


def same(one: Any, two: Any) -> None:
    one, two = leaves_by_name(one), leaves_by_name(two)
    assert one.keys() == two.keys() and all(np.array_equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize("table", [densenet_table(TINY), keras_table(TINY)])
def test_round_trip(tree: Any, table: Any) -> None:
    tensors = to_torch(tree, table)
    back = to_flax(tensors, table, tree)
    same(back, tree)
    again = to_torch(back, table)
    assert again.keys() == tensors.keys() and all(np.array_equal(again[n], value) for n, value in tensors.items())


def test_import_reads_the_shape_from_either_naming(tree: Any, tmp_path: Path) -> None:
    torch_names = to_torch(tree, densenet_table(TINY))
    np.savez(tmp_path / "torch.npz", **torch_names)
    keras = to_torch(tree, keras_table(TINY))
    heads = {"hidden/kernel": "dense_7/kernel:0", "hidden/bias": "dense_7/bias:0"}
    heads |= {"out/kernel": "dense_8/kernel:0", "out/bias": "dense_8/bias:0"}
    slashed = {name: re.sub("^conv1_", "conv1/", name) for name in keras}
    named = {heads.get(name, f"densenet121/{slashed[name]}:0"): value for name, value in keras.items()}
    assert "densenet121/conv1/bn/gamma:0" in named
    np.savez(tmp_path / "keras.npz", **named)
    for name in ("torch", "keras"):
        done = qc(tmp_path / f"{name}.npz")
        assert DenseNetConfig(**done.facts["densenet"]) == TINY
        same(done.trees["densenet"], tree)
    import_weights("qc", tmp_path / "keras.npz", tmp_path / "run")
    graph, params = load_qc(tmp_path / "run")
    same(jax.tree.map(np.asarray, params), tree)
    assert handover.read(tmp_path / "run", ("qc",)) and graph is not None


def test_what_is_no_densenet_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **{"a/kernel": np.zeros((3, 4)), "b/kernel": np.zeros((4, 1))})
    with pytest.raises(DataError, match="no DenseNet with a hidden layer"):
        qc(tmp_path / "x.npz")
    assert keras_name("model/densenet121/conv2_block1_0_bn/moving_variance:0") == "conv2_block1_0_bn/moving_variance"
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").write_bytes(b"")
    with pytest.raises(DataError, match=r"only TensorFlow reads: `pip install \"pbs-jax\[qc\]\"`"):
        qc(tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(("blocks", "growth", "stem", "side"), [((2, 3, 1), 8, 16, 64), ((6, 12, 24, 16), 32, 64, 96)])
def test_torchvision(blocks: tuple[int, ...], growth: int, stem: int, side: int, tmp_path: Path) -> None:
    """torchvision's DenseNet with Keras's epsilon, global max pooling and the head; the second is DenseNet121."""
    torch = pytest.importorskip("torch")
    densenet = pytest.importorskip("torchvision.models.densenet")
    torch.manual_seed(0)
    net = densenet.DenseNet(growth, blocks, stem)
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eps = 1.001e-5
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2)
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, 0, 0.2)
    hidden, out = torch.nn.Linear(net.classifier.in_features, 7), torch.nn.Linear(7, 1)
    net.eval()
    images = torch.rand(2, 3, side, side)
    with torch.no_grad():
        pooled = torch.relu(net.features(images)).amax((2, 3))
        theirs = out(torch.relu(hidden(pooled)))[:, 0].numpy()
    tensors = {name: value.numpy() for name, value in net.state_dict().items() if not name.startswith("classifier")}
    for name, layer in (("hidden", hidden), ("out", out)):
        tensors |= {f"{name}.{key}": value.detach().numpy() for key, value in layer.state_dict().items()}
    np.savez(tmp_path / "qc.npz", **tensors)
    done = qc(tmp_path / "qc.npz")
    config = dataclasses.replace(DenseNetConfig(**done.facts["densenet"]))
    assert (config.blocks, config.hidden, config.eps) == (blocks, 7, 1.001e-5)
    graph = definition(lambda rngs: DenseNet(config, rngs=rngs))
    pixels = jnp.asarray(images.permute(0, 2, 3, 1).numpy())

    def both(params: Any, pixels: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, params)
        return model.features(pixels), model(pixels)

    with jax.default_matmul_precision("highest"):
        features, logits = run(both, done.trees["densenet"], pixels)
    close(features, pooled.numpy(), 1e-5)
    close(logits, theirs, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Keras 3, model.export", "Keras 2, model.save"])
def test_keras_savedmodel(how: str, tmp_path: Path) -> None:
    """The released kind of file, through TensorFlow (extra qc): the same parameters as by npz, and Keras's own numbers.

    In an environment with TensorFlow: `pip install tensorflow-cpu tf_keras` beside the project's packages.
    """
    tensorflow = pytest.importorskip("tensorflow")
    keras = pytest.importorskip("tf_keras" if "2" in how else "keras")
    generator = np.random.default_rng(0)
    keras.utils.set_random_seed(0)
    base = keras.applications.densenet.DenseNet121(
        include_top=False, weights=None, input_shape=(64, 64, 3), pooling="max"
    )
    hidden = keras.layers.Dense(7, activation="relu")(base.output)
    model = keras.Model(base.input, keras.layers.Dense(1, activation="sigmoid")(hidden))
    for variable in model.weights:
        if len(variable.shape) == 1:  # fresh biases, scales and statistics are all 0 or 1: no two could be told apart
            value = 0.1 * generator.standard_normal(variable.shape)
            if "variance" in variable.name or "gamma" in variable.name:
                value = 1 + np.abs(value)
            variable.assign(value.astype(np.float32))
    folder = str(tmp_path / "saved")
    if "2" in how:
        model.save(folder, save_format="tf")
    else:
        model.export(folder, verbose=False)
    named = {getattr(v, "path", v.name).removeprefix("densenet/"): v.numpy() for v in model.weights}
    np.savez(tmp_path / "keras.npz", **named)
    done, by_npz = qc(tmp_path / "saved"), qc(tmp_path / "keras.npz")
    same(done.trees["densenet"], by_npz.trees["densenet"])
    import_weights("qc", tmp_path / "saved", tmp_path / "run")
    graph, params = load_qc(tmp_path / "run")
    images = generator.random((3, 64, 64, 3), np.float32) * np.array([0.1, 0.5, 1.0], np.float32)[:, None, None, None]
    with jax.default_matmul_precision("highest"):
        ours = run(lambda params, images: jax.nn.sigmoid(nnx.merge(graph, params)(images)), params, images)
    theirs = model(tensorflow.constant(images), training=False).numpy()[:, 0]
    print(ours, theirs)
    assert 0.01 < theirs.min() < theirs.max() < 0.99 and np.ptp(theirs) > 1e-3
    close(ours, theirs, 1e-5)
