"""From tensors to the rows that a model takes: one tensor of rows, or of a table one for each
column."""

from typing import Any

import numpy as np

from model_store.artifacts.manifest import CategoricalColumn, InputSpec, Manifest, NumericColumn
from model_store.errors import InvalidInput
from service.api.requests import Cells, Rows
from service.call import Call
from service.errors import TooLarge
from service.integrations.open_inference.tensors import BOOL, BYTES, Tensor

INPUT = "inputs"  # the one tensor of a model that takes one; any other name will do
GROUPS = "groups"  # of a model that is calibrated by group: the group of each row
CELL_BYTES = 40  # of a cell of a table, beside its tensor


def rows_of(
    tensors: list[Tensor], manifest: Manifest, max_rows: int, is_passed_on: bool, call: Call
) -> tuple[Rows, list[str] | None]:
    """Return the rows of a request as `/predict` takes them, and the groups of rows, if they came.

    Of an answer that is passed on, tensors that the model does not take are passed over.

    Raises:
        InvalidInput: naming the tensor that is absent, of the wrong shape or not of the model's.
        TooLarge: if there are more rows than there may be.
    """
    tensors, groups = _without_groups(tensors, manifest, call)
    spec = manifest.input
    if spec.columns:
        rows: Rows = _cells(tensors, spec, max_rows, is_passed_on, call)
    else:
        tensor = _only(tensors, is_passed_on)
        _check_rows(tensor, max_rows)
        rows = _rows(tensor, spec, call)
    return rows, groups


def _without_groups(
    tensors: list[Tensor], manifest: Manifest, call: Call
) -> tuple[list[Tensor], list[str] | None]:
    """Return the tensors of rows, and the groups."""
    categories = manifest.categories
    is_by_group = categories is not None and categories.kind == "group"
    given = next((tensor for tensor in tensors if tensor.name == GROUPS), None)
    if (
        not is_by_group
        or given is None
        or any(column.name == GROUPS for column in manifest.input.columns)
    ):
        return tensors, None
    if given.datatype != BYTES:
        raise InvalidInput(
            f"{given.place}.datatype", f"{BYTES}, the group of each row", given.datatype
        )
    values = given.values(call)
    groups = ["" if value is None else _text(value, given.place) for value in values]
    return [tensor for tensor in tensors if tensor is not given], groups


def _only(tensors: list[Tensor], is_passed_on: bool) -> Tensor:
    """Return the tensor of a model that takes one, by whatever name."""
    if len(tensors) == 1:
        return tensors[0]
    named = [tensor for tensor in tensors if tensor.name == INPUT]
    if is_passed_on and named:
        return named[0]
    raise InvalidInput("inputs", "one tensor of rows", f"{len(tensors)}")


def _check_rows(tensor: Tensor, max_rows: int) -> None:
    if tensor.shape[0] > max_rows:
        raise TooLarge(
            f"{tensor.place}.shape: expected at most {max_rows} rows, got {tensor.shape[0]}"
        )


def _rows(tensor: Tensor, spec: InputSpec, call: Call) -> Rows:
    if tensor.datatype == BYTES:
        if spec.image is None and spec.text is None:
            raise InvalidInput(
                f"{tensor.place}.datatype", "a datatype of numbers, FP32 for one", BYTES
            )
        _check_one_each(tensor)
        if spec.image is None:
            _refuse_base64(tensor)
        return tensor.values(call)
    if tensor.datatype == BOOL:
        raise InvalidInput(f"{tensor.place}.datatype", "a datatype of numbers, FP32 for one", BOOL)
    assert tensor.array is not None
    return tensor.array


def _refuse_base64(tensor: Tensor) -> None:
    """Raise InvalidInput for texts that would be predicted as they are packed."""
    if tensor.is_base64:
        raise InvalidInput(
            f"{tensor.place}.parameters.content_type", "text as it is (str), or none", "base64"
        )


def _check_one_each(tensor: Tensor) -> None:
    """Raise InvalidInput unless a tensor has an element for each row."""
    if len(tensor.shape) > 2 or tensor.size != tensor.shape[0]:
        raise InvalidInput(
            f"{tensor.place}.shape",
            "(N,) or (N, 1), an element for each row",
            f"{len(tensor.shape)} axes",
        )


def _cells(
    tensors: list[Tensor], spec: InputSpec, max_rows: int, is_passed_on: bool, call: Call
) -> Cells:
    """Return the cells of a table."""
    by_name = {tensor.name: tensor for tensor in tensors}
    names = [column.name for column in spec.columns]
    absent = next((name for name in names if name not in by_name), None)
    if absent is not None:
        raise InvalidInput(
            "inputs", f"a tensor for each of the {len(names)} columns", f"none of {absent!r}"[:100]
        )
    extra = next((tensor for tensor in tensors if tensor.name not in names), None)
    if extra is not None and not is_passed_on:
        known = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise InvalidInput(f"{extra.place}.name", f"one of the columns {known[:500]}", "another")
    count = by_name[names[0]].shape[0]
    cells: dict[str, list[Any] | np.ndarray] = {}
    for column in spec.columns:
        tensor = by_name[column.name]
        _check_rows(tensor, max_rows)
        _check_one_each(tensor)
        if tensor.size != count:
            raise InvalidInput(
                f"{tensor.place}.shape", f"{count} rows, as the tensors before it", f"{tensor.size}"
            )
        call.reservation.reserve(CELL_BYTES * count, "inputs")
        if tensor.datatype == BYTES:
            _refuse_base64(tensor)
            values = tensor.values(call)
            read = reader_of(column, spec.missing_values)
            cells[column.name] = [
                None if value is None else read(_text(value, tensor.place)) for value in values
            ]
        else:
            cells[column.name] = _numbers(tensor, column)
        call.pause()
    return Cells(cells, count)


def _numbers(tensor: Tensor, column: Any) -> list[Any] | np.ndarray:
    """Return the cells of a tensor that is not of BYTES; NaN is a missing value."""
    assert tensor.array is not None
    flat = tensor.array.reshape(-1)
    if isinstance(column, CategoricalColumn):
        return [None if value != value else value for value in flat.tolist()]
    if tensor.datatype == BOOL or not isinstance(column, NumericColumn):
        expected = (
            f"a datatype of numbers, or {BYTES}"
            if isinstance(column, NumericColumn)
            else f"{BYTES}, times as text"
        )
        raise InvalidInput(f"{tensor.place}.datatype", expected, tensor.datatype)
    return flat.astype(np.float64)


def _text(value: str | bytes, place: str) -> str:
    """Return an element of BYTES as text."""
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidInput(place, "text in UTF-8", "other bytes") from None
