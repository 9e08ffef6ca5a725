"""Reads C++ declarations from the sources as ctypes, so that structures are declared in one place only."""

from __future__ import annotations

import re
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any

_NUMBERS = {"float": c_float, "int": c_int32, "int32_t": c_int32, "int64": c_int64, "int64_t": c_int64}


class Declarations:
    """Structures and functions of some sources, found by name.

    Their types may be float, signed integers of 32 or 64 bits, 32-bit enumerations, pointers (to anything)
    and structures of the same sources. Most other types raise AssertionError, and so does the name of an
    unknown structure or kernel.
    """

    def __init__(self, text: str) -> None:
        self._text = re.sub(r"//.*", "", text)
        self._structures: dict[str, type[Structure]] = {}

    def structure(self, name: str) -> Any:
        """Returns structure `name` as a ctypes class. Its fields must come before its functions."""
        if name not in self._structures:
            found = re.search(rf"struct {name} {{(.*?)\n}};", self._text, re.DOTALL)
            assert found, f"there is no structure {name}"
            fields = []
            for member in found.group(1).split(";"):
                kind, _, names = member.replace("const ", "").strip().partition(" ")
                if "(" in member or not kind:
                    break
                # The star of a pointer stands beside its type or beside its name.
                fields += [
                    (each.strip(" \n*"), c_void_p if "*" in kind + each else self._type(kind))
                    for each in names.split(",")
                ]
            self._structures[name] = type(name, (Structure,), {"_fields_": fields})
        return self._structures[name]

    def functions(self, prefix: str) -> dict[str, tuple[Any, list[Any]]]:
        """Returns, by name, (result type, argument types) of functions whose names begin with `prefix`.
        Result type None: void. Functions that return pointers are left out."""
        found = re.findall(rf"^(\w+) ({prefix}\w+)\(([^)]*)\)", self._text, re.MULTILINE)
        return {
            name: (
                None if result == "void" else self._type(result),
                [
                    c_void_p if "*" in argument else self._type(argument.split()[-2])
                    for argument in filter(None, arguments.split(","))
                ],
            )
            for result, name, arguments in found
        }

    def parameters(self, kernel: str) -> Any:
        """Returns the structure that `KERNEL(kernel, structure, ...)` in a CUDA source declares as the
        kernel's parameter."""
        found = re.search(rf"KERNEL\({kernel}, (\w+)", self._text)
        assert found, f"there is no kernel {kernel}"
        return self.structure(found.group(1))

    def _type(self, name: str) -> Any:
        if name in _NUMBERS:
            return _NUMBERS[name]
        is_enumeration = re.search(rf"enum class {name} : int32_t", self._text) is not None
        return c_int32 if is_enumeration else self.structure(name)
