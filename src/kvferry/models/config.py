"""A model's Hugging Face ``config.json``, with bounds on every field that is read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvferry.errors import Reason, SettingsError, did_you_mean

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


def refuse(what: str, remedy: str = BY_HAND, reason: Reason = Reason.INVALID_SETTING) -> NoReturn:
    """Raise :class:`SettingsError`."""
    raise SettingsError(reason, what, remedy)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of the text model: those of ``text_config`` where that exists take precedence over the outer ones."""

    fields: Mapping[str, Any]

    @property
    def family(self) -> str:
        """The ``model_type``; empty where the configuration has none."""
        return str(self.fields.get("model_type") or "")

    @property
    def dtype(self) -> str:
        """The dtype of the model, and so of its cache."""
        return str(self.fields.get("torch_dtype") or self.fields.get("dtype") or "bfloat16")

    def number(self, *names: str) -> int:
        """Return the first of the named fields that exists.

        Raises :class:`SettingsError` (``invalid-setting``) where no field exists or the value is not a whole number
        from 1 to ``MAX_NUMBER``.

        >>> ModelConfig({"n_layer": 12}).number("num_hidden_layers", "n_layer")
        12
        >>> ModelConfig({}).number("n_layer")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        kvferry.errors.SettingsError: the configuration has no 'n_layer'. ... [invalid-setting]
        """
        name = next((name for name in names if self.fields.get(name) is not None), None)
        if name is None:
            refuse(f"the configuration has no {names[0]!r}.")
        value = self.fields[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_NUMBER:
            refuse(f"{name!r} is {_short(value)}, not a whole number from 1 to {MAX_NUMBER}.")
        return value

    def layer_types(self, num_layers: int) -> list[str] | None:
        """Return ``layer_types``, one name per layer, or None where the field is missing.

        Raises :class:`SettingsError` (``invalid-setting``) for any other value.
        """
        found = self.fields.get("layer_types", self.fields.get("layers_block_type"))
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != num_layers or not all(isinstance(kind, str) for kind in found):
            refuse(f"'layer_types' is not a list of {num_layers} names, one for each layer.")
        return found


def read_config(path: Path) -> ModelConfig:
    """Return the configuration in a file, or in the ``config.json`` of a folder.

    Raises :class:`SettingsError` (``invalid-setting``) for a file that cannot be read, is too large, or holds no JSON
    object.
    """
    path, remedy = path / "config.json" if path.is_dir() else path, "Name the model's config.json."
    try:
        if not path.is_file():
            remedy = f"Name a config.json, or a folder with one; models are not fetched. {BY_HAND}"
            refuse(f"{path} is not a file.", remedy)
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
    nested = fields.get("text_config")
    return ModelConfig({**fields, **nested} if isinstance(nested, dict) else fields)


def item_size(dtype: str) -> int:
    """Return the bytes of one number. Raises :class:`SettingsError` that suggests the nearest dtype.

    >>> item_size("torch.bfloat16")
    2
    """
    found = ITEM_SIZES.get(dtype.removeprefix("torch."))
    if found is None:
        refuse(f"dtype {_short(dtype)} is unknown.", did_you_mean(dtype, ITEM_SIZES))
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
