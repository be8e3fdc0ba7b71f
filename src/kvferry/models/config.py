"""A model's Hugging Face ``config.json``, read with suspicion."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import Reason, SettingsError

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
BY_HAND = "Give the shapes by hand."


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of the text model: those of ``text_config`` where there is one, and then the outer ones."""

    fields: Mapping[str, Any]

    @property
    def family(self) -> str:
        """The ``model_type``; empty where none is named."""
        return str(self.fields.get("model_type") or "")

    @property
    def dtype(self) -> str:
        """The dtype that the model names, and so that of its cache."""
        return str(self.fields.get("torch_dtype") or self.fields.get("dtype") or "bfloat16")

    def number(self, *names: str) -> int:
        """Return the first of the named fields that is there.

        Raises :class:`SettingsError` (``invalid-setting``) where none is, or where it is no whole number above zero.

        >>> ModelConfig({"n_layer": 12}).number("num_hidden_layers", "n_layer")
        12
        >>> ModelConfig({}).number("n_layer")
        Traceback (most recent call last):
            ...
        kvferry.errors.SettingsError: the configuration names no 'n_layer'. Give the shapes by hand. [invalid-setting]
        """
        name = next((name for name in names if self.fields.get(name) is not None), None)
        if name is None:
            raise SettingsError(Reason.INVALID_SETTING, f"the configuration names no {names[0]!r}.", BY_HAND)
        value = self.fields[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_NUMBER:
            what = f"{name!r} is {_short(value)}, not a whole number from 1 to {MAX_NUMBER}."
            raise SettingsError(Reason.INVALID_SETTING, what, BY_HAND)
        return value

    def layer_types(self, num_layers: int) -> list[str] | None:
        """Return ``layer_types``, one for each layer, or None where the field is missing.

        Raises :class:`SettingsError` (``invalid-setting``) for anything else.
        """
        found = self.fields.get("layer_types", self.fields.get("layers_block_type"))
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != num_layers or not all(isinstance(kind, str) for kind in found):
            what = f"'layer_types' is not a list of {num_layers} names, one for each of 'num_hidden_layers'."
            raise SettingsError(Reason.INVALID_SETTING, what, BY_HAND)
        return found


def read_config(path: Path) -> ModelConfig:
    """Return the configuration in a file, or in the ``config.json`` of a folder.

    Raises :class:`SettingsError` (``invalid-setting``) where that cannot be read, is too large, or is
    no JSON object.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        if not path.is_file():
            raise SettingsError(Reason.INVALID_SETTING, f"{path} is no file.", f"Name a config.json. {BY_HAND}")
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            what = f"{path} has more than {MAX_CONFIG_BYTES} bytes, which no config.json has."
            raise SettingsError(Reason.INVALID_SETTING, what, "Name the model's config.json.")
        fields = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, SettingsError):
            raise
        what = f"{path} is no model configuration: {error}."
        raise SettingsError(Reason.INVALID_SETTING, what, "Name the model's config.json.") from None
    if not isinstance(fields, dict):
        raise SettingsError(Reason.INVALID_SETTING, f"{path} holds no JSON object.", "Name the model's config.json.")
    nested = fields.get("text_config")
    return ModelConfig({**fields, **nested} if isinstance(nested, dict) else fields)


def item_size(dtype: str) -> int:
    """Return the bytes of one number. Raises :class:`SettingsError` naming the nearest dtype.

    >>> item_size("torch.bfloat16")
    2
    """
    found = ITEM_SIZES.get(dtype.removeprefix("torch."))
    if found is None:
        nearest = difflib.get_close_matches(dtype, ITEM_SIZES, n=1, cutoff=0.0)[0]
        raise SettingsError(Reason.INVALID_SETTING, f"dtype {_short(dtype)} is unknown.", f"Did you mean {nearest!r}?")
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
