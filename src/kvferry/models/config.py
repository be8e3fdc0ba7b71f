"""A model's Hugging Face ``config.json``, with bounds on every field that is read.

The fields are those that the model type's configuration class makes of the file, where the transformers library is
installed: a published file leaves out what its class fills in. Without the class, a field is read where the file has
it, or where its family is known to leave it to vLLM's own rule; any other missing field is refused by its name.
The library is imported only when a file is read, which takes seconds; a model's own code (``auto_map``) never runs.
"""

import importlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kvferry.errors import Reason, SettingsError, did_you_mean, nearest
from kvferry.layout.shard import MAX_LAYERS

MAX_CONFIG_BYTES = 1 << 22
MAX_NUMBER = 1 << 31
ITEM_SIZES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "fp8": 1,
    "int8": 1,
}
"""Bytes of one number of each dtype."""
BY_HAND = "Give --layers, --kv-heads and --head-size in place of --model."
PUBLISHED = Path(__file__).with_name("published.json")
"""The fields of public models that shape their caches, by the models' names on the Hugging Face hub."""
TRAINING = re.compile(r"-(instruct|it|pt|base|chat|thinking|hf)(?=-|$)|-\d{4}$")
"""Parts of a model's name that say how the model was trained, and not what shape it has."""
SCHEMES = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Fields by which a quantised model says how its cache is quantised."""


def refuse(what: str, remedy: str = BY_HAND, reason: Reason = Reason.INVALID_SETTING) -> NoReturn:
    """Raise :class:`SettingsError`."""
    raise SettingsError(reason, what, remedy)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of the text model: those of ``text_config`` where that exists take precedence over the outer ones.

    ``written`` are the names in the file. ``origin`` says what read it. ``missing_class`` says why no class has filled
    in what the file leaves out; it is empty where one has.
    """

    fields: Mapping[str, Any]
    written: frozenset[str] = frozenset()
    architectures: tuple[str, ...] = ()
    origin: str = "the configuration alone"
    missing_class: str = "no class has read it"
    quantisation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The ``model_type``; empty where the configuration has none."""
        return str(self.fields.get("model_type") or "")

    @property
    def dtype(self) -> str:
        """The dtype in which vLLM computes the model: half precision for a model in float32.

        Raises :class:`SettingsError` (``invalid-setting``) where the configuration names none: vLLM then looks into the
        weights.

        >>> ModelConfig({"dtype": "float32"}).dtype
        'bfloat16'
        """
        found = self.fields.get("torch_dtype") or self.fields.get("dtype")
        if found is None:
            refuse("the configuration has no 'dtype'; vLLM takes it from the weights.", "Give --dtype, say bfloat16.")
        name = str(found).removeprefix("torch.")
        return "bfloat16" if name == "float32" else name

    @property
    def cache_dtype(self) -> str | None:
        """The dtype to which the model's quantisation sets its attention cache; None where it sets none.

        Raises :class:`SettingsError` (``unsupported``) for a quantisation other than 8-bit floating point.

        >>> scheme = {"type": "float", "num_bits": 8}
        >>> quantisation = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
        >>> ModelConfig({}, quantisation=quantisation).cache_dtype
        'fp8'
        """
        method, inner = str(self.quantisation.get("quant_method") or ""), self.quantisation.get("quantization")
        for found in (self.quantisation, inner if isinstance(inner, dict) else {}):
            for name in SCHEMES:
                if scheme := found.get(name):
                    return _cache_dtype(name, scheme, method)
        return None

    def number(self, *names: str) -> int:
        """Return the first of the named fields that exists.

        Raises :class:`SettingsError` (``invalid-setting``) where no field exists or the value is not a whole number
        from 1 to ``MAX_NUMBER``.

        >>> ModelConfig({"n_layer": 12}).number("num_hidden_layers", "n_layer")
        12
        >>> ModelConfig({}, missing_class="transformers is not installed").number("n_layer")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        kvferry.errors.SettingsError: the configuration has no 'n_layer', ... transformers is not installed. ...
        """
        name = next((name for name in names if self.fields.get(name) is not None), None)
        if name is None:
            self.refuse_missing(names[0])
        value = self.fields[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_NUMBER:
            refuse(f"{name!r} is {_short(value)}, not a whole number from 1 to {MAX_NUMBER}.")
        return value

    def refuse_missing(self, name: str) -> NoReturn:
        """Raise :class:`SettingsError` (``invalid-setting``) for a field that neither the file nor a class has."""
        if not self.missing_class:
            refuse(f"the configuration has no {name!r}, and {self.origin} fills in none.")
        what = f"the configuration has no {name!r}, which its class may fill in, and {self.missing_class}."
        refuse(what, f"Install transformers, in which the class is, or write the field. {BY_HAND}")

    def layer_types(self, num_layers: int) -> list[str] | None:
        """Return ``layer_types``, one name per layer, or None where the field is missing.

        Raises :class:`SettingsError` (``invalid-setting``) for any other value.
        """
        names = ("layer_types", "layers_block_type")
        found = next((value for name in names if (value := self.fields.get(name)) is not None), None)
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != num_layers or not all(isinstance(kind, str) for kind in found):
            refuse(f"'layer_types' is not a list of {num_layers} names, one for each layer.")
        return found


def config_of(fields: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a file's fields. Raises :class:`SettingsError` as :func:`read_by_class` does."""
    nested = fields.get("text_config")
    outer = {**fields, **nested} if isinstance(nested, dict) else fields
    if not outer.get("model_type"):
        refuse("the file has no 'model_type', so it describes no model.", f"Name the model's config.json. {BY_HAND}")
    by_class = read_by_class(fields)
    quantisation = outer.get("quantization_config") or outer.get("compression_config")
    named = fields.get("architectures")
    return ModelConfig(
        fields={**outer, **by_class.fields},
        written=frozenset(outer),
        architectures=tuple(map(str, named)) if isinstance(named, list) else (),
        origin=by_class.origin,
        missing_class=by_class.missing,
        quantisation=quantisation if isinstance(quantisation, dict) else {},
    )


def published_config(name: str) -> ModelConfig | None:
    """Return the configuration of a public model by its name on the Hugging Face hub; None where kvferry lacks it.

    The owner may be left out, and what a name says of training, such as ``-Instruct``. Nothing is fetched.

    >>> published_config("Llama-3.1-8B-Instruct").origin
    'the published meta-llama/Llama-3.1-8B'
    """
    wanted = TRAINING.sub("", name.lower())
    for known, fields in _published().items():
        whole = TRAINING.sub("", known.lower())
        if wanted in (whole, whole.partition("/")[2]):
            origin = f"the published {known}"
            return ModelConfig(fields, frozenset({"model_type"}), origin=origin, missing_class="")
    return None


def _published() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(PUBLISHED.read_text())
    return found


def read_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a file, or of the ``config.json`` of a folder.

    Raises :class:`SettingsError` (``invalid-setting``) for a file that cannot be read, is too large, or holds no JSON
    object.
    """
    path, remedy = path / "config.json" if path.is_dir() else path, "Name the model's config.json."
    try:
        if not path.is_file():
            meant = nearest(str(path), _published())
            hint = f"Did you mean {meant!r}? Else name" if meant else "Name"
            remedy = f"{hint} a config.json, or a folder with one; models are not fetched. {BY_HAND}"
            refuse(f"{path} is not a file, and no public model that kvferry knows.", remedy)
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            refuse(f"{path} has more than {MAX_CONFIG_BYTES} bytes; a config.json is shorter.", remedy)
        fields = json.loads(text)
    except SettingsError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(Reason.INVALID_SETTING, f"{path} is not a model configuration: {error}.", remedy) from None
    if not isinstance(fields, dict):
        refuse(f"{path} holds no JSON object.", remedy)
    return fields


def item_size(dtype: str) -> int:
    """Return the bytes of one number. Raises :class:`SettingsError` that suggests the nearest dtype.

    >>> item_size("torch.bfloat16")
    2
    """
    found = ITEM_SIZES.get(dtype.removeprefix("torch."))
    if found is None:
        refuse(f"dtype {_short(dtype)} is unknown.", did_you_mean(dtype, ITEM_SIZES))
    return found


def _cache_dtype(name: str, scheme: Any, method: str) -> str:
    """Return the dtype of a scheme as vLLM reads it: compressed-tensors describe it, ModelOpt may name it."""
    by_modelopt = method.startswith("modelopt")
    if by_modelopt and isinstance(scheme, str) and scheme.lower() == "fp8":
        return "fp8"
    is_described = by_modelopt or method in ("compressed-tensors", "compressed_tensors")
    if is_described and isinstance(scheme, dict) and scheme.get("type") == "float" and scheme.get("num_bits") == 8:
        return "fp8"
    what = f"{name!r} of quantisation {method!r} is {_short(scheme)}; kvferry knows caches of 8-bit floating point."
    refuse(what, "Give --dtype, the one of the cache.", Reason.UNSUPPORTED)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


SAME_CLASS = {"kimi_k2": "deepseek_v3", "deepseek_v32": "deepseek_v3"}
"""Model types that vLLM reads with another type's class."""
UNUSED = ("rope_scaling", "rope_parameters", "quantization_config", "compression_config")
"""Fields without effect on the cache's shape, which classes of some releases refuse."""
PROPERTIES = ("layer_types", "layers_block_type", "head_dim", "num_key_value_heads", "sliding_window")
"""Fields that some classes compute, so that they are not among the written ones."""
AS_WRITTEN = ("qk_rope_head_dim",)
"""Fields that some classes overwrite by ``head_dim``; vLLM reads them from the file, too."""
COUNTS = re.compile("(layers|labels|blocks|depths?)$|^n_layer$|first_k_dense")
"""Names of numbers for which classes make lists as long."""


@dataclass(frozen=True, slots=True)
class ReadByClass:
    """The text model's fields by its class, and the class's name; or ``missing``, why there is no class."""

    fields: Mapping[str, Any]
    origin: str
    missing: str = ""


def read_by_class(fields: Mapping[str, Any]) -> ReadByClass:
    """Return the text model's fields as the configuration class of ``fields["model_type"]`` fills them in.

    Raises :class:`SettingsError` (``invalid-setting``) for fields that the class refuses, ``unsupported`` for a number
    of layers, or the like, of which a class would make too long a list.
    """
    alone = "the configuration alone"
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        return ReadByClass({}, alone, "transformers is not installed")
    family = str(fields.get("model_type") or "")
    library = f"transformers {transformers.__version__}"
    known = SAME_CLASS.get(family, family)
    if known not in transformers.CONFIG_MAPPING:
        return ReadByClass({}, alone, f"{library} has no class for model type {family!r}")
    with _quiet():
        try:
            _refuse_long_lists(fields)
            text = transformers.CONFIG_MAPPING[known].from_dict(_without(fields)).get_text_config()
            found = _fields(text)
        except SettingsError:
            raise
        except Exception as error:  # a class may raise anything at fields that it does not expect
            what = f"the class of model type {family!r} in {library} refuses the configuration: {_first_line(error)}."
            remedy = "Correct the configuration, or use the transformers release that it was written for."
            raise SettingsError(Reason.INVALID_SETTING, what, remedy) from None
    nested = fields.get("text_config")
    written = {**fields, **nested} if isinstance(nested, dict) else fields
    found |= {name: written[name] for name in AS_WRITTEN if written.get(name) is not None}
    if known != family and not isinstance(nested, dict):
        found["model_type"] = family
    return ReadByClass(found, f"{type(text).__name__} of {library}")


def _fields(text: Any) -> dict[str, Any]:
    found: dict[str, Any] = text.to_dict()
    for name in (*type(text).attribute_map, *PROPERTIES):
        value = getattr(text, name, None)
        if value is not None:
            found[name] = list(value) if isinstance(value, tuple) else value
    # The dtype is what the file says: a class may leave it out or give it as an object.
    return {name: value for name, value in found.items() if name not in ("dtype", "torch_dtype")}


def _refuse_long_lists(value: Any, name: str = "") -> None:
    """Refuse a count, nested ones included, that would take a class minutes and all memory."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            _refuse_long_lists(each, str(key))
    elif isinstance(value, list):
        for each in value:
            _refuse_long_lists(each, name)
    elif isinstance(value, (int, float)) and value > MAX_LAYERS and COUNTS.search(name):
        what = f"the configuration's {name[:60]!r} is above {MAX_LAYERS}, the limit for a number of layers or the like."
        raise SettingsError(Reason.UNSUPPORTED, what, "Correct the configuration.")


def _without(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a class reads, nested ones included, with infinity as a number."""
    return {name: _decoded(value) for name, value in fields.items() if name not in UNUSED}


def _decoded(value: Any) -> Any:
    """Return a value of a file: the library writes infinity as ``{"__float__": "Infinity"}``."""
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if isinstance(value, dict):
        return float(value["__float__"]) if set(value) == {"__float__"} else _without(value)
    return value


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's advice on unusual fields out of the command's output."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
