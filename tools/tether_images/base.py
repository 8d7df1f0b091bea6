"""A base image out of what this machine has: its CPython with the shared libraries it is linked to, a shell, the tools
that agents' commands are made of, certificates. For machines without a registry, and for tests; what is published is
built on `python:3.13-slim`.

The tag names what went in, so an image that is there is never built again.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tether_images.engine import docker, size_bytes

REPOSITORY: Final = "tether-base"
TOOLS: Final = (
    *("bash", "sh", "cat", "chmod", "chown", "cp", "cut", "date", "dirname", "basename", "echo", "env", "false"),
    *("find", "grep", "head", "id", "ln", "ls", "mkdir", "mv", "printf", "pwd", "rm", "rmdir", "sed", "sleep", "sort"),
    *("tail", "tee", "test", "touch", "tr", "true", "uname", "uniq", "wc", "xargs"),
)
_LEFT_OUT: Final = frozenset(
    [
        *("config", "dist-packages", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"),
        *("tkinter", "turtledemo"),
    ]
)
_NO_MODULES: Final = ("_tkinter.", "_test", "_xx", "xx")  # of lib-dynload
_LINKED: Final = re.compile(r"(/\S+) \(0x")
_CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
# Found at run time, linked to by what wheels and CLIs bring along.
_BESIDES: Final = (
    *("libgcc_s.so.1", "libstdc++.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libutil.so.1"),
    *("libnss_dns.so.2", "libresolv.so.2"),
)
_FOLDERS: Final = {
    "tmp": 0o1777,
    "root": 0o700,
    **dict.fromkeys(("bin", "dev", "etc", "opt", "proc", "run", "sys", "usr", "var", "var/lib"), 0o755),
}
_FILES: Final = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\n",
    "etc/nsswitch.conf": "hosts: files dns\npasswd: files\ngroup: files\n",
}


def local_base() -> str:
    """The image, built where it is missing. Raises ImageError."""
    image = f"{REPOSITORY}:{_fingerprint()}"
    if size_bytes(image) is None:
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                _fill(archive)
            file.seek(0)
            docker("import", "-c", "ENV PATH=/usr/local/bin:/usr/bin:/bin", "-", image, stdin=file)
    return image


def _python() -> Path:
    return Path(sys.executable).resolve()


def _fingerprint() -> str:
    parts = [sys.version, Path(__file__).read_text(encoding="utf-8")]
    parts += [f"{path} {path.stat().st_mtime_ns}" for path in (_python(), Path("/bin/sh").resolve())]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"py{sys.version_info.major}.{sys.version_info.minor}-{digest[:12]}"


def _fill(archive: tarfile.TarFile) -> None:
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    programs = {f"usr/local/bin/{name}": _python()}
    for tool in TOOLS:
        found = shutil.which(tool, path="/usr/bin:/bin")
        if found is not None:
            programs[f"bin/{tool}"] = Path(found).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    modules = [path for path in (library / "lib-dynload").glob("*.so") if not path.name.startswith(_NO_MODULES)]
    for folder, mode in _FOLDERS.items():
        _folder(archive, folder, mode)
    for target, source in programs.items():
        archive.add(source, arcname=target)
    for link, to in (("usr/local/bin/python3", name), ("usr/bin/env", "/bin/env")):
        _link(archive, link, to)
    archive.add(library, arcname=f"usr/local/lib/{name}", filter=_needed)
    for target, source in sorted(_libraries([*programs.values(), *modules]).items()):
        archive.add(source, arcname=target)
    if _CERTIFICATES.exists():
        archive.add(_CERTIFICATES.resolve(), arcname=str(_CERTIFICATES).lstrip("/"))
    for target, text in _FILES.items():
        entry = tarfile.TarInfo(target)
        entry.size, entry.mode = len(text), 0o644
        archive.addfile(entry, io.BytesIO(text.encode()))


def _needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Modules with what they were compiled to: nothing can be written where they run."""
    path = Path(entry.name)
    folders = path.parts[4:]
    if _LEFT_OUT.intersection(folders) or any(part.startswith("config-") for part in folders):
        return None
    unused = path.suffix == ".a" or ".opt-" in path.name
    return None if unused or (path.parent.name == "lib-dynload" and path.name.startswith(_NO_MODULES)) else entry


def _libraries(binaries: Iterable[Path]) -> dict[str, Path]:
    """Shared libraries and the loader: place in the image, place here. What lies outside of the loader's own folders
    here (a Python of one's own) lies beside libc there, where it is found without a word in the environment."""
    found: set[Path] = set()
    for binary in binaries:
        told = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
        found.update(Path(path) for path in _LINKED.findall(told))
    system = next(path.parent for path in found if path.name.startswith("libc.so"))
    found.update(system / name for name in _BESIDES if (system / name).exists())
    usual = ("/lib", "/usr/lib")
    places = {path: path if str(path).startswith(usual) else system / path.name for path in found}
    return {str(place).lstrip("/"): path.resolve() for path, place in places.items()}


def _folder(archive: tarfile.TarFile, name: str, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    archive.addfile(entry)


def _link(archive: tarfile.TarFile, name: str, to: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, to
    archive.addfile(entry)
