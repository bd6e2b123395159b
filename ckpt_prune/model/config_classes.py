"""Transformers' config classes, imported without its modeling code."""

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

_ACTIVATIONS, _VALIDATORS = "transformers.activations", "transformers.utils.type_validators"


class _Activations(Mapping[str, Any]):
    """`ACT2FN` of transformers, imported when it is looked at."""

    @property
    def _all(self) -> Mapping[str, Any]:
        activations: Mapping[str, Any] = import_module(_ACTIVATIONS).ACT2FN
        return activations

    def __getitem__(self, name: str) -> Any:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def import_validators() -> None:
    """Import the validators of transformers' config classes, which take a second or nothing.

    They know the names of activations by a table of modules, whose import brings along all that loads models, with
    torch.distributed and sympy. Few configs ask for it. So it is imported only then; a transformers that asks for more
    at once gets it.
    """
    if _VALIDATORS in sys.modules or _ACTIVATIONS in sys.modules:
        return
    stand_in = ModuleType(_ACTIVATIONS)
    stand_in.__dict__["ACT2FN"] = _Activations()
    sys.modules[_ACTIVATIONS] = stand_in
    try:
        import_module(_VALIDATORS)
    except ImportError:
        sys.modules.pop(_VALIDATORS, None)  # the usual way says what is wrong, if anything is
    finally:
        if sys.modules.get(_ACTIVATIONS) is stand_in:
            del sys.modules[_ACTIVATIONS]
