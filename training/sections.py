"""The base class for recipe sections, and the types of their keys."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

Count = Annotated[int, Field(ge=1)]
LogStd = Annotated[float, Field(ge=-20, le=2)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """The base class for recipe sections.

    In each pair of `requires`, the first key requires the second. Keys in a pair of `excludes`
    cannot be combined.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    requires: ClassVar[Sequence[tuple[str, str]]] = ()
    excludes: ClassVar[Sequence[tuple[str, str]]] = ()

    def has(self, key: str) -> bool:
        """Check whether a key has a non-default value."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    def refuse(self, expected: str, *path: str | int) -> NoReturn:
        """Raise a `ValidationError` for the key at a path."""
        value: Any = self
        for part in path:
            value = value[part] if isinstance(part, int) else getattr(value, part)
        error = PydanticCustomError("combination", "{expected}", {"expected": expected})
        raise ValidationError.from_exception_data(
            type(self).__name__, [{"type": error, "loc": path, "input": value}]
        )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        for key, other in self.excludes:
            if self.has(key) and self.has(other):
                self.refuse(f"no value with {other}", key)
        for key, other in self.requires:
            if self.has(key) and not self.has(other):
                self.refuse(f"no value without {other}", key)
        return self
