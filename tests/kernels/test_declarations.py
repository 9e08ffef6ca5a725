"""C++ declarations as ctypes, against what g++ makes of the same text."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from quire_kernels.declarations import Declarations

SOURCE = """
#include <cstdint>
enum class Kind : int32_t { none = 0, some = 1 };
struct Inner {
  const void* data;  // a comment; with "struct Outer {" in it
  float scale;
  Kind kind;

  int64_t twice() const { return 2 * int64_t(scale); }
};
struct Outer {
  Inner inner;
  const float *left, *right;
  int32_t count,
      total;
  int64_t stride;
};
extern "C" {
void add_outer(const Outer* x, Kind kind,
               int64_t more, double* result) {
  *result = double(x->inner.scale) + int(kind) + *x->left + *x->right;
  *result += x->count + x->total + x->stride + more;
}
int64_t add_twice(const Inner* x) { return x->twice() + (x->data != nullptr); }
int add_nothing() { return 7; }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_compiler_sees_what_python_wrote(tmp_path: Path) -> None:
    (tmp_path / "source.cpp").write_text(SOURCE)
    made = tmp_path / "made.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", str(tmp_path / "source.cpp"), "-o", str(made)], check=True, timeout=280
    )
    library = ctypes.CDLL(str(made))
    declared = Declarations(SOURCE)
    functions = declared.functions("add_")
    assert set(functions) == {"add_outer", "add_twice", "add_nothing"}
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    left, right, total = ctypes.c_float(0.25), ctypes.c_float(0.5), ctypes.c_double()
    inner = declared.structure("Inner")(None, 3.0, 1)
    addresses = (ctypes.addressof(left), ctypes.addressof(right))
    outer = declared.structure("Outer")(inner, *addresses, 10, 100, 1 << 40)
    library.add_outer(ctypes.byref(outer), 1, 1 << 41, ctypes.addressof(total))
    assert total.value == 3.0 + 1 + 0.25 + 0.5 + 10 + 100 + (1 << 40) + (1 << 41)
    assert library.add_twice(ctypes.byref(inner)) == 6 and library.add_nothing() == 7


def test_a_type_that_is_not_known_is_refused() -> None:
    declared = Declarations("struct Odd {\n  short x;\n};\n")
    with pytest.raises(AssertionError, match="short"):
        declared.structure("Odd")
