"""What TensorRT-RTX compiled for a GPU is kept beside the bundle, and read only where nobody else may write it."""

import pytest

from specbuild.runtime.backends.tensorrt.runtime_cache import RuntimeCache, cache_path


class Kernels:
    """TensorRT-RTX's cache: what has been compiled, and whether it takes what is given."""

    def __init__(self, takes=True):
        self.takes, self.held, self.attached = takes, b"", False

    def create_runtime_cache(self):
        return self

    def set_runtime_cache(self, cache):
        self.attached = cache is self
        return True

    def deserialize(self, blob):
        self.held = blob if self.takes else b""
        return self.takes

    def serialize(self):
        return memoryview(self.held)

    def compile(self, kernel):
        """How many kernels had to be compiled."""
        missing = kernel not in self.held
        self.held += kernel if missing else b""
        return int(missing)


@pytest.fixture
def path(tmp_path):
    found = cache_path(tmp_path / "x.bundle", "target", "ab" * 32, "89")
    assert found == tmp_path / "x.bundle.rtx-cache" / "target-sm89-abababababababab"
    return found


def load(path, takes=True):
    """Attach, compile, save; how many kernels were compiled."""
    kernels, cache = Kernels(takes), RuntimeCache(path)
    cache.attach(kernels)
    assert kernels.attached, "before a context is made"
    compiled = kernels.compile(b"first") + kernels.compile(b"second")
    cache.save()
    return compiled


def test_a_second_load_compiles_nothing(path):
    assert load(path) == 2
    written = path.stat()
    assert (written.st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert load(path) == 0
    assert path.stat().st_ino == written.st_ino, "nothing new, nothing written"
    assert load(path, takes=False) == 2, "another GPU's is refused, and replaced"
    assert path.read_bytes() == b"firstsecond"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("mode", [0o620, 0o602])
@pytest.mark.parametrize("which", ["file", "folder"])
def test_code_that_others_may_write_is_not_read(path, caplog, mode, which):
    load(path)
    place = path if which == "file" else path.parent
    place.chmod(mode | 0o100)
    assert load(path) == 2
    assert caplog.messages == [f"{place} is not this user's alone: compiling anew, chmod go-w or remove it"]


def test_a_place_that_cannot_be_written_is_said(path, caplog):
    path.parent.write_text("no folder")
    assert load(path) == 2
    (line,) = caplog.messages
    assert line.startswith(f"{path} cannot be written (")
    assert line.endswith("): every load compiles anew")


def test_tensorrt_rtx_has_such_a_cache():
    rtx = pytest.importorskip("tensorrt_rtx")
    for kind, names in (
        (rtx.IRuntimeConfig, ("create_runtime_cache", "set_runtime_cache")),
        (rtx.IRuntimeCache, ("serialize", "deserialize")),
        (rtx.IExecutionContext, ("is_stream_capturable",)),
    ):
        assert [name for name in names if not hasattr(kind, name)] == []
