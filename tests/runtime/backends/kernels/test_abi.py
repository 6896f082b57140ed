"""The kernels' C interface is the header's, field by field, and a library of another header is refused."""

import ctypes
import re
import shutil
import subprocess
from ctypes import c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime.backends.kernels import abi
from specbuild.runtime.backends.kernels.abi import (
    LAUNCHERS,
    STRUCTS,
    Attention,
    Choose,
    Dtype,
    Fault,
    KernelLibrary,
    Walk,
)
from specbuild.runtime.errors import ExecutionError, OptionError

PLUGINS = Path(__file__).resolve().parents[4] / "plugins"
HEADERS = "\n".join((PLUGINS / f"{name}.h").read_text(encoding="utf-8") for name in ("kernels", "resident"))
CODE = re.sub(r"/\*.*?\*/", "", HEADERS, flags=re.DOTALL)
NUMBERS = {"int32_t": c_int32, "int64_t": c_int64, "uint64_t": c_uint64, "float": c_float, "double": c_double}


def declared(name):
    """The fields of struct specbuild_<name>, as ctypes has them."""
    found = re.search(rf"struct specbuild_{name} \{{(.*?)\}}", CODE, re.DOTALL)
    assert found
    fields = list[tuple[str, Any]]()
    for declaration in filter(None, map(str.strip, found[1].split(";"))):
        kind, names = re.fullmatch(r"((?:const |volatile )*\w+)\s*(.*)", declaration, re.DOTALL).groups()
        for each in names.split(","):
            pointer, plain = "*" in each, re.sub(r"\*|const", "", each).strip()
            if size := re.fullmatch(r"(\w+)\[(\d+)\]", plain):
                fields.append((size[1], STRUCTS[kind.removeprefix("specbuild_")] * int(size[2])))
            else:
                fields.append((plain, c_void_p if pointer else NUMBERS[kind]))
    return fields


@pytest.mark.parametrize("name", STRUCTS)
def test_a_struct_has_the_headers_fields(name):
    """In their order and of their types: two of one size that change places are seen by no size."""
    assert declared(name) == [tuple(field) for field in STRUCTS[name]._fields_]


def test_every_struct_and_launcher_of_the_header_is_there():
    assert set(STRUCTS) == set(re.findall(r"typedef struct specbuild_(\w+)", CODE))
    launchers = re.findall(r"int specbuild_(\w+)\(const specbuild_(\w+) \*p, void \*stream\)", CODE)
    assert {name: STRUCTS[struct] for name, struct in launchers} == LAUNCHERS


@pytest.mark.parametrize(("enum", "prefix"), [(Dtype, "SPECBUILD_"), (Fault, "SPECBUILD_FAULT_")])
def test_numbers_have_the_headers_names(enum, prefix):
    (body,) = re.findall(rf"typedef enum \{{([^}}]*)\}} specbuild_{enum.__name__.lower()};", CODE)
    found = {name.removeprefix(prefix): int(value) for name, value in re.findall(r"(\w+) = (\d+)", body)}
    assert found == {each.name: each.value for each in enum}


def compiled(folder, *lines):
    """A library of these lines of C."""
    compiler = shutil.which("cc") or shutil.which("gcc") or pytest.skip("needs a C compiler")
    source, library = folder / "library.c", folder / "library.so"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{PLUGINS}", str(source), "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """One of the header, whose walk fails as it is asked to: on a stream CUDA's way, or by its `vocab`."""
    sizes = "".join(f'if (!strcmp(n, "{name}")) return sizeof(specbuild_{name});' for name in STRUCTS)
    path = compiled(
        tmp_path_factory.mktemp("library"),
        '#include "kernels.h"',
        "#include <string.h>",
        f"size_t specbuild_struct_size(const char *n) {{ {sizes} return 0; }}",
        'const char *specbuild_error(void) { return "out of luck"; }',
        "size_t specbuild_attention_workspace(const specbuild_attention *p) { return 16 * p->splits; }",
        "size_t specbuild_choose_workspace(const specbuild_choose *p) { return ((size_t)1 << 40) + p->best; }",
        "int specbuild_walk_tree(const specbuild_walk *p, void *s) { return s ? SPECBUILD_CUDA_ERROR : p->vocab; }",
    )
    return KernelLibrary(path)


def test_another_header_is_refused(library, monkeypatch, tmp_path):
    """Whichever of its structs it is that has another size; and what is no library at all."""
    for name, struct in STRUCTS.items():
        short = type("Short", (ctypes.Structure,), {"_fields_": [*struct._fields_, ("more", c_int64)]})
        monkeypatch.setattr(abi, "STRUCTS", STRUCTS | {name: short})
        size = ctypes.sizeof(struct)
        with pytest.raises(
            ExecutionError, match=f"was compiled from another version, {name} has {size} bytes: compile"
        ):
            KernelLibrary(library.path)
    (tmp_path / "no.so").write_bytes(b"nothing")
    with pytest.raises(ExecutionError, match="is no library of specbuild's kernels"):
        KernelLibrary(tmp_path / "no.so")


def test_a_library_without_the_workspaces_is_none(tmp_path):
    """Of an older interface, or of anything else."""
    old = compiled(tmp_path, "char *specbuild_error(void) { return 0; }", "long specbuild_struct_size() { return 0; }")
    with pytest.raises(ExecutionError, match=r"is no library of specbuild's kernels: .*specbuild_attention_workspace"):
        KernelLibrary(old)


def test_another_struct_is_refused(library):
    class Other(ctypes.Structure):
        _fields_ = Attention._fields_

    with pytest.raises(OptionError, match="tree_attention takes Attention, not Other"):
        library.launch("tree_attention", Other())


def test_what_a_launch_found_wrong_is_said(library):
    """Input that is refused is the caller's fault; what CUDA refuses is not."""
    library.launch("walk_tree", Walk(vocab=0))
    with pytest.raises(OptionError, match=r"^out of luck$"):
        library.launch("walk_tree", Walk(vocab=1))
    with pytest.raises(ExecutionError, match=r"^out of luck$"):
        library.launch("walk_tree", Walk(), stream=1 << 40)


def test_a_workspace_is_asked_of_its_own_kernel_and_may_be_large(library):
    assert library.workspace(Attention(splits=3)) == 48
    assert library.workspace(Choose(best=5)) == (1 << 40) + 5
