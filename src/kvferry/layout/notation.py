"""How a layout is printed: as the formula that it is."""

import itertools
from collections.abc import Sequence


def affine_step(offsets: Sequence[int]) -> int | None:
    """Return the constant difference of the offsets, or None where there is none.

    >>> affine_step((0, 4096, 8192)), affine_step((0, 1, 5)), affine_step((7,))
    (4096, None, 0)
    """
    steps = {after - before for before, after in itertools.pairwise(offsets)} or {0}
    return steps.pop() if len(steps) == 1 else None


def formula(name: str, layer_offsets: Sequence[int], strides: Sequence[tuple[str, int]]) -> str:
    """Return a component as its name, its memory order and its address formula.

    ``strides`` names the axes other than L with their strides in bytes.

    >>> formula("kv", (0, 4096, 8192), [("B", 98304), ("H", 12288), ("N", 256), ("C", 2)])
    'kv BHLNC: base + b*98304 + h*12288 + l*4096 + n*256 + c*2'
    >>> formula("kv", (64, 0, 4096), [("B", 98304), ("H", 12288), ("N", 256), ("C", 2)])
    'kv B H N C: base + layer[l] + b*98304 + h*12288 + n*256 + c*2'
    """
    step = affine_step(layer_offsets)
    origin = f" + {layer_offsets[0]}" if step is not None and layer_offsets[0] else ""
    terms = list(strides)
    if step:
        terms.append(("L", step))
    # Longest stride first is the memory order. The sort is stable, so that equal strides keep the order they came in.
    terms.sort(key=lambda term: -abs(term[1]))
    order = "".join(axis for axis, _ in terms) if step is not None else " ".join(axis for axis, _ in terms)
    if step == 0:
        order = "L" + order
    layers = " + layer[l]" if step is None else ""
    return f"{name} {order}: base{origin}{layers}" + "".join(f" + {axis.lower()}*{stride}" for axis, stride in terms)
