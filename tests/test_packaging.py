"""What is shipped, what it costs to import, and that optional packages stay optional."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ["cutlass", "jax_triton", "triton", "tokamax", "orbax", "huggingface_hub", "matplotlib", "fastapi"]


def python(code, *flags, **environment):
    """Runs code in a new interpreter, away from the root."""
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], env=env, capture_output=True, text=True, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_cheap_and_lazy():
    out = python(
        "import jax, sys, time; before = set(sys.modules); start = time.perf_counter(); import jmla\n"
        "print(time.perf_counter() - start); print(*sorted(set(sys.modules) - before))",
        PYTHONPATH=str(ROOT),
    )
    seconds, modules = out.splitlines()
    assert float(seconds) < 2
    assert not [name for name in modules.split() if name.startswith(("jmla.", "flax", "tokenizers", "rich", "typer"))]


def test_p5_optional_packages_are_never_imported(tmp_path):
    """A package that raises when imported does no harm: nothing imports it on a machine that does not use it."""
    for name in OPTIONAL:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('{name} was imported')\n")
    out = python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})  # where CuTe DSL's own .pth file puts it\n"
        "import pkgutil, importlib, jmla\n"
        "names = [m.name for m in pkgutil.walk_packages(jmla.__path__, 'jmla.')]\n"
        "# Kernels are imported at a call.\n"
        "cute = ['kernel', 'place', 'gather', 'consume', 'output', 'merge', 'codes', 'finish', 'ptx']\n"
        "kernels = ('.triton', '.quant_triton', '.gluon', '.cute', *('.cute_' + x for x in cute))\n"
        "names = [name for name in names if not name.endswith(('__main__', '.bench.empty', *kernels))]\n"
        "[importlib.import_module(n) for n in names]\n"
        "[getattr(jmla, n) for n in jmla.__all__]\n"
        "print(len(names))",
        PYTHONPATH=str(ROOT),
    )
    assert int(out) > 20


def test_public_names():
    import jmla

    assert set(jmla.__all__) <= set(dir(jmla))
    for name in jmla.__all__:
        assert getattr(jmla, name).__doc__
    assert callable(jmla.generate)
    assert jmla.kernels.__name__ == "jmla.kernels"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jmla.nothing  # noqa: B018


def test_floors_are_relative_links():
    for name in ("kernels", "models"):
        assert os.readlink(ROOT / "jmla" / name) == f"../{name}"


def test_imports_point_down():
    for floor, above in (("kernels", r"jmla\.models|jmla import models"), ("models", r"jmla\.(?!kernels|models)\w+")):
        for file in (ROOT / floor).rglob("*.py"):
            lines = [x for x in file.read_text().splitlines() if re.match(r"\s*(from|import)\s+jmla", x)]
            assert not [line for line in lines if re.search(above, line)], file
            plain = [x for x in file.read_text().splitlines() if re.match(r"\s*(from|import)\s+(kernels|models)\b", x)]
            assert not plain, file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy so that the work tree stays clean; unpacked as an installation would."""
    tmp = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("jmla", "kernels", "models"):
        shutil.copytree(ROOT / name, tmp / "tree" / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp / "tree" / name)
    code = f"import os; os.chdir({str(tmp / 'tree')!r}); from setuptools import build_meta as b; b.build_wheel('..')"
    python(code)
    (file,) = tmp.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp / "site")
        return tmp / "site", archive.namelist()


def test_wheel_holds_the_package_and_nothing_else(wheel):
    _, names = wheel
    assert {name.split("/")[0] for name in names} == {"jmla", "jmla-0.1.0.dist-info"}
    sources = {f"jmla/{p.relative_to(ROOT / 'jmla').as_posix()}" for p in (ROOT / "jmla").glob("*.py")}
    for part in ("bench", "engine"):
        sources |= {f"jmla/{part}/{p.name}" for p in (ROOT / "jmla" / part).glob("*.py")}
    for floor in ("kernels", "models"):
        sources |= {f"jmla/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / floor).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    data = ROOT / "jmla" / "data"
    wanted = {f"jmla/data/{p.relative_to(data).as_posix()}" for p in data.rglob("*") if p.is_file()}
    assert {name for name in names if name.startswith("jmla/data/")} == wanted
    assert {"jmla/py.typed", "jmla-0.1.0.dist-info/licenses/LICENSE"} <= set(names)


def test_no_plain_names_are_installed(wheel):
    site, _ = wheel
    out = python(
        "from importlib.util import find_spec\n"
        "print(find_spec('kernels'), find_spec('models'), find_spec('jmla.kernels').origin, find_spec('jmla').origin)",
        "-S",
        PYTHONPATH=str(site),
    ).split()
    assert out == ["None", "None", str(site / "jmla/kernels/__init__.py"), str(site / "jmla/__init__.py")]


@pytest.mark.slow
def test_pytest_runs_in_the_root_against_the_installed_wheel(wheel):
    site, _ = wheel
    env = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    assert subprocess.run(command, cwd=ROOT, env=env, check=False).returncode == 0


def test_sizes():
    """The bundled model within 5 MiB, the repository's files within 9 MiB."""
    data = ROOT / "jmla" / "data"
    assert sum(p.stat().st_size for p in data.rglob("*") if p.is_file()) <= 5 << 20
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert sum(p.stat().st_size for p in files if p.is_file() and not p.is_symlink()) < 9 << 20


def test_readme_names_both_commands():
    readme = (ROOT / "README.md").read_text()
    assert "sh run demo" in readme
    assert "sh run test" in readme
    assert "sh run test" in (ROOT / ".ci" / "run").read_text()


def bare_machine(tmp_path, **programs):
    """A directory with ``run`` and a PATH that holds next to nothing."""
    tree, tools = tmp_path / "tree", tmp_path / "bin"
    tree.mkdir()
    tools.mkdir()
    shutil.copy(ROOT / "run", tree)
    shutil.copy(ROOT / "pyproject.toml", tree)
    for name in ("cat", "cksum", "dirname", "grep", "rm", "sed", "mkdir", "cp"):
        (tools / name).symlink_to(shutil.which(name))
    for name, text in programs.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    env = {"PATH": str(tools), "HOME": str(tmp_path)}

    def call(*args):
        return subprocess.run(
            ["/bin/sh", str(tree / "run"), *args], env=env, capture_output=True, text=True, check=False
        )

    return call, tree


def test_run_says_what_to_install_without_python(tmp_path):
    old = "exit 1"  # as a Python below 3.12 answers the version check
    call, tree = bare_machine(tmp_path, python3=old)
    done = call("demo")
    assert done.returncode == 1
    assert "apt-get install python3.12 python3.12-venv" in done.stderr
    assert not (tree / ".venv").exists()


@pytest.mark.parametrize("place", ["path", "pyenv"])
def test_run_finds_a_python(tmp_path, place):
    """On the PATH under another name than python3, or among pyenv's versions."""
    script = f'case "$*" in *"-m venv"*) echo "$0" >{tmp_path}/used; exit 7;; esac'
    call, _ = bare_machine(tmp_path, **({"python3.13": script} if place == "path" else {}))
    if place == "pyenv":
        home = tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin"
        home.mkdir(parents=True)
        (home / "python3").write_text(f"#!/bin/sh\n{script}\n")
        (home / "python3").chmod(0o755)
    assert call("test").returncode == 7
    used = (tmp_path / "used").read_text().strip()
    assert used.endswith("python3.13" if place == "path" else ".pyenv/versions/3.12.1/bin/python3")


def test_run_installs_once_and_passes_arguments_on(tmp_path):
    """What the tests need without a GPU comes along; another pyproject.toml installs anew."""
    log = tmp_path / "log"
    python = f"""case "$*" in
        "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python;;
        "-m "*) echo "$*" >>{log};;
    esac"""
    call, tree = bare_machine(tmp_path, python3=python)
    for _ in range(2):
        assert call("test", "-k", "a or b").returncode == 0
    (tree / "pyproject.toml").write_text("[project]")
    assert call("test").returncode == 0
    install = "-m pip install --quiet --editable .[test,lowering]"
    run = "-m pytest --numprocesses 2 --dist loadfile"
    assert log.read_text().splitlines() == [install, *[f"{run} -k a or b"] * 2, install, run]


def test_run_explains_itself(tmp_path):
    call, _ = bare_machine(tmp_path)
    done = call()
    assert done.returncode == 2
    assert "sh run demo" in done.stderr
