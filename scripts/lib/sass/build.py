"""Compiles the kernels for every architecture of the build and disassembles them. Everything is kept in build/sass,
named by a hash of what it was made from."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import listing

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / "build" / "sass"
REQUIREMENTS = ROOT / "scripts" / "lib" / "requirements-sass.txt"
# The release build's, of cmake/MinillmBuild.cmake.
FLAGS = ["-std=c++20", "--expt-relaxed-constexpr", "-O3", "-DNDEBUG"]
JOBS = 2


def fail(message):
    raise SystemExit(f"sass_report: {message}")


def find_nvcc():
    found = shutil.which("nvcc") or shutil.which("nvcc", path=os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin")
    if not found:
        fail("no nvcc on PATH or in CUDA_HOME; the CUDA toolkit (12.8 or newer) has it, no GPU is needed")
    return found


def nvcc_version(nvcc):
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"\bV(\d+\.\d+\.\d+)", text)[1]


def find_disassembler():
    """cuobjdump, which calls nvdisasm: of the toolkit, or from PyPI."""
    nvcc_folder = str(Path(find_nvcc()).resolve().parent)
    path = os.environ.get("PATH", "") + os.pathsep + nvcc_folder
    if shutil.which("cuobjdump", path=path) and shutil.which("nvdisasm", path=path):
        return shutil.which("cuobjdump", path=path)
    venv = CACHE / f"tools-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]}"
    if not (venv / "complete").exists():
        print("==> installing cuobjdump and nvdisasm into", venv, file=sys.stderr)
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin" / "pip", "install", "--quiet", "-r", REQUIREMENTS], check=True)
        (venv / "complete").touch()
    found = sorted(venv.glob("lib/python*/site-packages/nvidia/*/bin/cuobjdump"))
    if not found:
        fail(f"{venv} holds no cuobjdump: the packages of {REQUIREMENTS} have changed their layout")
    return str(found[0])


def architectures():
    """Those that the cuda preset builds for: 80, 90a, …"""
    presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
    cuda = next(preset for preset in presets if preset["name"] == "cuda")
    return cuda["cacheVariables"]["CMAKE_CUDA_ARCHITECTURES"].split(";")


def with_includes(source):
    """`source` and every file of the repository that it includes, in a fixed order."""
    found, pending = {}, [source]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found[path] = path.read_bytes()
        for name in re.findall(rb'^\s*#\s*include\s*[<"]([^>"]+)[>"]', found[path], re.MULTILINE):
            for folder in (ROOT, ROOT / "src", path.parent):
                candidate = (folder / name.decode()).resolve()
                if candidate.is_file():
                    pending.append(candidate)
                    break
    return sorted(found.items())


def key_of(source, architecture, versions):
    digest = hashlib.sha256(repr((architecture, versions, FLAGS)).encode())
    for path, text in with_includes(source):
        digest.update(str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).encode() + b"\0" + text)
    return digest.hexdigest()[:24]


def run(command, **options):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, **options)
    if result.returncode != 0:
        fail(f"{' '.join(map(str, command))}\nreturned {result.returncode}:\n{result.stdout}{result.stderr}")
    return result


class Toolchain:
    def __init__(self):
        self.nvcc = find_nvcc()
        self.version = nvcc_version(self.nvcc)
        self.cuobjdump = find_disassembler()
        self._environment = {**os.environ, "NVDISASM_PATH": str(Path(self.cuobjdump).parent)}

    def texts(self, source, architecture):
        """(SASS, resource usage, ptxas' messages) of a source for sm_<architecture>."""
        folder = CACHE / f"{source.stem}.{architecture}.{key_of(source, architecture, (self.version, self.cuobjdump))}"
        if not folder.exists():
            self._make(folder, source, architecture)
        return tuple((folder / name).read_text() for name in ("sass", "resources", "ptxas"))

    def _make(self, folder, source, architecture):
        """Fills `folder`, which appears whole or not at all, and removes what it replaces."""
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="new-") as temporary:
            made, cubin = Path(temporary, "made"), Path(temporary, "cubin")
            made.mkdir()
            compiled = run(
                [self.nvcc, *FLAGS, f"-I{ROOT}", f"-I{ROOT / 'src'}", "-Xptxas=-v", "-cubin"]
                + [f"-arch=sm_{architecture}", source, "-o", cubin]
            )
            sass = run([self.cuobjdump, "-sass", cubin], env=self._environment).stdout
            kept = [line for line in sass.splitlines() if listing.INSTRUCTION.match(line) or "Function" in line]
            # Without the encodings, which are most of the text.
            (made / "sass").write_text("\n".join(line.split(";")[0] + ";" if ";" in line else line for line in kept))
            usage = run([self.cuobjdump, "-res-usage", cubin], env=self._environment)
            (made / "resources").write_text(usage.stdout + usage.stderr)
            (made / "ptxas").write_text(compiled.stderr)
            for old in CACHE.glob(f"{source.stem}.{architecture}.*"):
                shutil.rmtree(old, ignore_errors=True)
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():  # otherwise another run has made the same
                    raise


def read_all(toolchain, sources=None):
    """The kernels of all sources (kernels/*.cu by default) for all architectures."""
    sources = sources or sorted((ROOT / "kernels").glob("*.cu"))

    def read(job):
        source, architecture = job
        return listing.read_kernels(source.name, f"sm_{architecture}", *toolchain.texts(source, architecture))

    jobs = [(source, architecture) for source in sources for architecture in architectures()]
    with ThreadPoolExecutor(JOBS) as pool:
        return [kernel for kernels in pool.map(read, jobs) for kernel in kernels]
