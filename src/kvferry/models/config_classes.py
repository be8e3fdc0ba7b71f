"""The configuration class of a model type, which fills in the fields that a published ``config.json`` leaves out.

The transformers library has the classes; it is imported when a file is read and only then, because the import takes
seconds. A model's own code (``auto_map``) never runs. vLLM takes the classes by the same rule.
"""

import importlib
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvferry.errors import Reason, SettingsError
from kvferry.layout.component import MAX_LAYERS

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
