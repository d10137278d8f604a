"""How one record becomes bytes and back: feature specifications, a deterministic tf.Example serialiser, a fast parser.

The bytes are those of TFDS, made without TensorFlow (DESIGN section 4). Arrays are raw little-endian bytes
(`Encoding.BYTES`); bfloat16, which TFDS lacks, is stored as uint16 and viewed. Images stay encoded.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from data_prep.schema import DataError

KINDS = ("text", "texts", "image", "scalar", "array")


@dataclasses.dataclass(frozen=True, slots=True)
class FeatureSpec:
    """One field of a record.

    kind   in Python
    text   str
    texts  list[str]
    image  bytes, JPEG (`dtype` "jpeg") or PNG ("png"), RGB
    scalar int or float, `dtype` int64 or float32
    array  numpy array of `dtype` and `shape`; the first axis may be -1 (any length)
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FeatureSpec:
        return cls(value["kind"], value["dtype"], tuple(value["shape"]))


TEXT = FeatureSpec("text")
TEXTS = FeatureSpec("texts")
JPEG = FeatureSpec("image", "jpeg")
INT = FeatureSpec("scalar", "int64")
FLOAT = FeatureSpec("scalar", "float32")


def array(dtype: str, *shape: int) -> FeatureSpec:
    return FeatureSpec("array", dtype, shape)


Features = Mapping[str, FeatureSpec]


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _stored_dtype(spec: FeatureSpec) -> np.dtype:
    return np.dtype(np.uint16) if spec.dtype == "bfloat16" else np.dtype(spec.dtype)


def tfds_features(features: Features) -> Any:
    """The same features as a `tfds.features.FeaturesDict`. Raises DataError for an unknown kind or a bad name."""
    import tensorflow_datasets as tfds

    def build(name: str, spec: FeatureSpec) -> Any:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise DataError(f'feature name "{name}" must be lower-case letters, digits and underscores')
        match spec.kind:
            case "text":
                return tfds.features.Text()
            case "texts":
                return tfds.features.Sequence(tfds.features.Text())
            case "image":
                return tfds.features.Image(encoding_format=spec.dtype)
            case "scalar":
                return tfds.features.Scalar(dtype=np.dtype(spec.dtype))
            case "array":
                shape = tuple(None if side == -1 else side for side in spec.shape)
                return tfds.features.Tensor(
                    shape=shape, dtype=_stored_dtype(spec), encoding=tfds.features.Encoding.BYTES
                )
        raise DataError(f'feature "{name}" has kind "{spec.kind}"; the kinds are {", ".join(KINDS)}')

    return tfds.features.FeaturesDict({name: build(name, spec) for name, spec in sorted(features.items())})


def _stored(name: str, spec: FeatureSpec, value: Any) -> dict[str, list[Any]]:
    """The tf.Feature of a value, as keyword -> values. Raises DataError if the value is not of the feature's kind."""
    match spec.kind:
        case "text" if isinstance(value, str):
            return {"bytes_list": [value.encode()]}
        case "texts" if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return {"bytes_list": [item.encode() for item in value]}
        case "image" if isinstance(value, bytes) and value:
            return {"bytes_list": [value]}
        case "scalar" if spec.dtype == "int64" and isinstance(value, int | np.integer):
            return {"int64_list": [int(value)]}
        case "scalar" if spec.dtype == "float32" and isinstance(value, int | float | np.integer | np.floating):
            return {"float_list": [float(value)]}
        case "array":
            given = np.asarray(value)
            fits = len(given.shape) == len(spec.shape) and all(
                want in (-1, side) for want, side in zip(spec.shape, given.shape, strict=True)
            )
            if given.dtype == numpy_dtype(spec.dtype) and fits:
                return {"bytes_list": [given.tobytes()]}
            raise DataError(
                f'feature "{name}" wants {spec.dtype}{list(spec.shape)} and got {given.dtype}{list(given.shape)}'
            )
    raise DataError(f'feature "{name}" of kind {spec.kind} cannot hold a {type(value).__name__}')


def serializer(features: Features) -> Callable[[Mapping[str, Any]], bytes]:
    """A function record -> tf.Example bytes, equal in every process, and to what TFDS's own (ten times slower) encoder
    gives with deterministic serialisation. It raises DataError for missing, extra or wrong fields."""
    from tensorflow_datasets.proto import tf_example_pb2, tf_feature_pb2

    lists = {
        "bytes_list": tf_feature_pb2.BytesList,
        "int64_list": tf_feature_pb2.Int64List,
        "float_list": tf_feature_pb2.FloatList,
    }

    def feature(name: str, spec: FeatureSpec, value: Any) -> Any:
        ((kind, values),) = _stored(name, spec, value).items()
        return tf_feature_pb2.Feature(**{kind: lists[kind](value=values)})

    def serialize(record: Mapping[str, Any]) -> bytes:
        if record.keys() != features.keys():
            odd = sorted(record.keys() ^ features.keys())
            raise DataError(f"a record must have exactly the dataset's features; these differ: {', '.join(odd)}")
        fields = {name: feature(name, spec, record[name]) for name, spec in features.items()}
        example = tf_example_pb2.Example(features=tf_feature_pb2.Features(feature=fields))
        return example.SerializeToString(deterministic=True)

    return serialize


def parser(features: Features) -> Callable[[bytes], dict[str, Any]]:
    """A function tf.Example bytes -> record. Arrays are read-only views; images stay encoded bytes."""
    from tensorflow_datasets.proto import tf_example_pb2

    def value(spec: FeatureSpec, fields: Any, name: str) -> Any:
        match spec.kind:
            case "text":
                return fields[name].bytes_list.value[0].decode()
            case "texts":
                return [item.decode() for item in fields[name].bytes_list.value]
            case "image":
                return fields[name].bytes_list.value[0]
            case "scalar":
                field = fields[name]
                return field.int64_list.value[0] if spec.dtype == "int64" else field.float_list.value[0]
        return np.frombuffer(fields[name].bytes_list.value[0], numpy_dtype(spec.dtype)).reshape(spec.shape)

    def parse(raw: bytes) -> dict[str, Any]:
        fields = tf_example_pb2.Example.FromString(raw).features.feature
        return {name: value(spec, fields, name) for name, spec in features.items()}

    return parse
