"""Tensors of the device, in the place of torch's CUDA tensors where there is no GPU.

A tensor's storage is the mapping that no processor may touch, so whatever the product does with its address is found.
Operations of torch are the device's: they run on the second mapping, and what they return is a tensor of the device. A
number, a list or an array of numpy would be a read by the processor, which CUDA refuses or waits for: it ends the
process as a touch does. Only ``cpu()`` and ``to("cpu")`` copy to the host.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .untouchable import DEVICE, DeviceMemory, reachable, span_of

# What describes a tensor without a look at its bytes, by the names of functions and properties.
_DESCRIBES = ("__len__", "dim", "dtype", "element_size", "is_contiguous", "itemsize", "layout", "ndim", "nelement")
_DESCRIBES += ("numel", "requires_grad", "shape", "size", "storage_offset", "stride")
# These take content or indices of the host.
_COPIES_FROM_HOST = ("copy_", "__setitem__", "__getitem__")
_host_to = torch.Tensor.to


@dataclass(frozen=True, slots=True)
class DeviceStorage:
    """What the product may ask of a storage."""

    _address: int
    _length: int

    @property
    def device(self) -> torch.device:
        return torch.device(DEVICE)

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._length


class DeviceTensor(torch.Tensor):
    """A tensor on the device. What an operation has computed lies in memory of its own, whose address nobody gets."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(DEVICE)

    def __repr__(self, *_: object, **__: object) -> str:
        return f"<{self.dtype} of {tuple(self.shape)} on {DEVICE}>"

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        function: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = _name_of(function), dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if name == "data_ptr":
                return _storage(args[0]).data_ptr() + args[0].storage_offset() * args[0].element_size()
            if name == "untyped_storage":
                return _storage(args[0])
            if name in ("cpu", "to") and (device := _target(name, args, kwargs)) is not None:
                return on_host(args[0]).clone() if device.type == "cpu" else args[0]
            on_device, of_host = _tensors([args, kwargs])
            if name not in _COPIES_FROM_HOST and any(each.dim() for each in of_host):
                raise RuntimeError(f"{name}: expected all tensors to be on the same device, {DEVICE} and cpu")
            result = function(*on_host(args), **on_host(kwargs))
            if name in _DESCRIBES:
                return result
            return _on_device(result, [each.untyped_storage() for each in on_device])


def device_tensor(memory: DeviceMemory) -> DeviceTensor:
    """Return all bytes of device memory as a tensor."""
    return tensor_at(memory.region.base_address, memory.nbytes)


def tensor_at(address: int, length: int) -> DeviceTensor:
    """Return a range of device memory as bytes."""
    return torch.frombuffer(_bytes_at(address, length), dtype=torch.uint8).as_subclass(DeviceTensor)


def like(tensor: torch.Tensor, memory: DeviceMemory) -> DeviceTensor:
    """Return the view of device memory that a tensor of the host is of its own storage."""
    content = torch.frombuffer(_bytes_at(memory.region.base_address, memory.nbytes), dtype=torch.uint8)
    return _moved(tensor, content.untyped_storage()).as_subclass(DeviceTensor)


def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In the place of ``torch.Tensor.to``: the device is not one that torch knows."""
    if isinstance(tensor, DeviceTensor) or (device := _target("to", (tensor, *args), kwargs)) is None:
        return _host_to(tensor, *args, **kwargs)
    return _host_to(tensor, *args, **kwargs) if device.type == "cpu" else tensor.clone().as_subclass(DeviceTensor)


def end_of_process() -> None:
    """Touch device memory."""
    ctypes.string_at(DeviceMemory(1).region.base_address, 1)


def _name_of(function: Callable[..., Any]) -> str:
    owner = getattr(function, "__self__", None)
    return owner.__name__ if function.__name__ == "__get__" and owner is not None else function.__name__


def _target(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """Return the device to which a call moves its tensor; None where it names none."""
    if name == "cpu":
        return torch.device("cpu")
    given = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, str | torch.device)]
    return torch.device(given[0]) if given else None


def _tensors(given: Any) -> tuple[list[DeviceTensor], list[torch.Tensor]]:
    """Return the tensors of the device, and those of the host, among arguments."""
    found: tuple[list[DeviceTensor], list[torch.Tensor]] = [], []
    if isinstance(given, DeviceTensor):
        found[0].append(given)
    elif isinstance(given, torch.Tensor):
        found[1].append(given)
    elif isinstance(given, list | tuple | dict):
        for each in given.values() if isinstance(given, dict) else given:
            for kept, more in zip(found, _tensors(each), strict=True):
                kept.extend(more)  # type: ignore[arg-type]
    return found


def _storage(tensor: torch.Tensor) -> DeviceStorage:
    storage = tensor.untyped_storage()
    if span_of(storage.data_ptr(), 1) is None:
        end_of_process()
    return DeviceStorage(storage.data_ptr(), storage.nbytes())


def on_host(given: Any) -> Any:
    """Return arguments with tensors of the second mapping in the place of the device's."""
    if isinstance(given, DeviceTensor):
        plain, storage = given.as_subclass(torch.Tensor), given.untyped_storage()
        address, length = storage.data_ptr(), storage.nbytes()
        if span_of(address, 1) is None:
            return plain
        second = torch.frombuffer(_bytes_at(reachable(address, length), length), dtype=torch.uint8)
        return _moved(plain, second.untyped_storage())
    if isinstance(given, dict):
        return {name: on_host(each) for name, each in given.items()}
    if isinstance(given, list | tuple):
        return type(given)(map(on_host, given)) if type(given) in (list, tuple) else given
    return given


def _on_device(result: Any, storages: Sequence[torch.UntypedStorage]) -> Any:
    """Return what an operation has returned as the device would: views of ``storages``, and new tensors."""
    if isinstance(result, torch.Tensor):
        for storage in storages:
            if reachable(storage.data_ptr()) == result.untyped_storage().data_ptr():
                return _moved(result, storage).as_subclass(DeviceTensor)
        return result.as_subclass(DeviceTensor)
    if isinstance(result, list | tuple):
        return type(result)(_on_device(each, storages) for each in result)
    if result is not None:
        end_of_process()
    return None


def _moved(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the same view of another storage; touches no byte of it."""
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload,no-any-return]


def _bytes_at(address: int, length: int) -> Any:
    return (ctypes.c_uint8 * length).from_address(address)
