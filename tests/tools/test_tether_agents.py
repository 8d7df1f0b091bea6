"""Finding and installing agent CLIs: order, versions, repeats, concurrency, and errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tether_agents import __main__ as command
from tether_agents import install, locate
from tether_agents.install import EXIT_FAILED, EXIT_UNREACHABLE, EXIT_USAGE, InstallFailure, install_agent
from tether_agents.locate import FoundAgent, Pin, Problem, find_agent, load_pins

PIN = load_pins()["claude"]
pytestmark = pytest.mark.skipif(
    locate.platform_key() not in PIN.binaries, reason=f"no pinned agent has a binary for {locate.platform_key()}"
)


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def fake_claude(path: Path, version: str = PIN.version) -> Path:
    return executable(path, f"echo '{version} (Claude Code)'")


def binary_in(folder: Path) -> Path:
    return folder / PIN.binaries[locate.platform_key()]


def fake_npm(folder: Path, body: str) -> str:
    """An npm that counts its calls in `calls`; `$PREFIX` is where it is to install."""
    calls = folder / "calls"
    script = f'echo "$@" >> {calls}\nwhile [ "$1" != --prefix ]; do shift; done\nPREFIX=$2\n{body}'
    return str(executable(folder / "npm", script))


def good_npm(folder: Path, version: str = PIN.version) -> str:
    binary = PIN.binaries[locate.platform_key()]
    write = f"printf '#!/bin/sh\\necho {version}\\n' > $PREFIX/{binary}; chmod +x $PREFIX/{binary}"
    return fake_npm(folder, f"mkdir -p $PREFIX/{Path(binary).parent}; {write}")


def environment(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "PATH": f"{tmp_path}/bin"}


def test_every_pin_names_an_exact_version_and_a_binary_for_this_platform() -> None:
    for pin in load_pins().values():
        assert all(part.isdecimal() for part in pin.version.split("."))
        assert locate.platform_key() in pin.binaries


def test_the_agents_folder_comes_before_the_cache_and_the_cache_before_path(tmp_path: Path) -> None:
    env = environment(tmp_path)
    agents = tmp_path / "agents"
    places = {
        "PATH": fake_claude(tmp_path / "bin" / "claude"),
        "cache": fake_claude(binary_in(locate.cache_root(env) / "claude" / PIN.version)),
        "agents-dir": fake_claude(binary_in(agents / "claude" / PIN.version)),
    }
    for source in ("agents-dir", "cache", "PATH"):
        found = find_agent("claude", agents, environment=env)
        assert isinstance(found, FoundAgent)
        assert (found.source, found.path, found.is_pinned) == (source, places[source], True)
        places[source].unlink()
    missing = find_agent("claude", agents, environment=env)
    assert isinstance(missing, Problem)
    assert missing.code == "not_found"
    assert "python -m tether_agents install claude" in str(missing)


@pytest.mark.parametrize("place", [lambda folder: folder / "claude", binary_in])
def test_an_agents_folder_may_hold_the_binary_or_an_npm_prefix(tmp_path: Path, place: Callable[[Path], Path]) -> None:
    path = fake_claude(place(tmp_path / "agents"))
    found = find_agent("claude", tmp_path / "agents", environment=environment(tmp_path))
    assert isinstance(found, FoundAgent)
    assert found.path == path


def test_another_version_is_refused_by_name_unless_the_caller_takes_it(tmp_path: Path) -> None:
    fake_claude(tmp_path / "bin" / "claude", "1.0.0")
    env = environment(tmp_path)
    refused = find_agent("claude", environment=env)
    assert isinstance(refused, Problem)
    assert refused.code == "wrong_version"
    assert "1.0.0" in refused.detail
    assert PIN.version in refused.detail
    taken = find_agent("claude", environment=env, allow_other_version=True)
    assert isinstance(taken, FoundAgent)
    assert (taken.version, taken.is_pinned) == ("1.0.0", False)


def test_the_pinned_version_on_path_wins_over_another_in_the_agents_folder(tmp_path: Path) -> None:
    fake_claude(tmp_path / "agents" / "claude", "1.0.0")
    fake_claude(tmp_path / "bin" / "claude")
    found = find_agent("claude", tmp_path / "agents", environment=environment(tmp_path))
    assert isinstance(found, FoundAgent)
    assert found.source == "PATH"


@pytest.mark.parametrize("script", ["exit 1", "echo nonsense", "echo 2.1.332; exit 3"])
def test_a_binary_that_does_not_tell_its_version_is_broken(tmp_path: Path, script: str) -> None:
    executable(tmp_path / "bin" / "claude", script)
    found = find_agent("claude", environment=environment(tmp_path))
    assert isinstance(found, Problem)
    assert found.code == "broken"


def test_a_binary_that_does_not_answer_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "VERSION_TIMEOUT_S", 0.05)
    executable(tmp_path / "bin" / "claude", "exec sleep 60")
    found = find_agent("claude", environment=environment(tmp_path))
    assert isinstance(found, Problem)
    assert "gave no answer" in found.detail


def test_a_binary_that_cannot_be_run_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "bin" / "claude"
    path.parent.mkdir()
    path.write_bytes(b"\x7fELF not really")
    path.chmod(0o755)
    found = find_agent("claude", environment=environment(tmp_path))
    assert isinstance(found, Problem)
    assert "cannot be started" in found.detail


def test_the_binary_sees_nothing_of_the_callers_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "x")
    executable(tmp_path / "bin" / "claude", f'echo "${{SOME_SECRET:-{PIN.version}}}"')
    found = find_agent("claude", environment=environment(tmp_path))
    assert isinstance(found, FoundAgent)


def test_an_install_is_done_once_and_found_again(tmp_path: Path) -> None:
    npm = good_npm(tmp_path)
    first, again = (install_agent("claude", tmp_path / "cache", npm=npm) for _ in range(2))
    assert isinstance(first, FoundAgent)
    assert first == again
    assert first.path == binary_in(tmp_path / "cache" / "claude" / PIN.version)
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "--ignore-scripts" in call
    assert call.endswith(f"{PIN.package}@{PIN.version}")


def test_installs_at_the_same_time_wait_for_each_other(tmp_path: Path) -> None:
    npm = good_npm(tmp_path)
    outcomes: list[FoundAgent | InstallFailure] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(install_agent("claude", tmp_path / "cache", npm=npm)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 4
    assert all(isinstance(outcome, FoundAgent) for outcome in outcomes)
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_a_cut_off_or_broken_install_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "claude"
    (folder / f"{PIN.version}.partial" / "node_modules").mkdir(parents=True)
    executable(binary_in(folder / PIN.version), "exit 1")
    assert isinstance(install_agent("claude", tmp_path / "cache", npm=good_npm(tmp_path)), FoundAgent)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", PIN.version]


@pytest.mark.parametrize(
    ("stderr", "exit_code", "words"),
    [
        ("npm error code ECONNREFUSED", EXIT_UNREACHABLE, "cannot reach its registry"),
        ("npm error code ENOTFOUND\nnpm error errno ENOTFOUND", EXIT_UNREACHABLE, "npm config get registry"),
        ("npm ERR! code EAI_AGAIN", EXIT_UNREACHABLE, "cannot reach its registry"),
        ("npm error code E404", EXIT_FAILED, "does not have"),
        ("npm error code ETARGET", EXIT_FAILED, "does not have"),
        ("npm error code EACCES", EXIT_FAILED, "npm failed"),
        ("", EXIT_FAILED, "no message"),
    ],
)
def test_a_failing_npm_becomes_one_line_and_leaves_nothing(
    tmp_path: Path, stderr: str, exit_code: int, words: str
) -> None:
    npm = fake_npm(tmp_path, f"printf '%s\\n' '{stderr}' >&2; exit 1")
    failure = install_agent("claude", tmp_path / "cache", npm=npm)
    assert isinstance(failure, InstallFailure)
    assert failure.exit_code == exit_code
    assert words in failure.message
    assert "\n" not in failure.message
    assert [path.name for path in (tmp_path / "cache" / "claude").iterdir()] == [".lock"]


def test_a_missing_npm_names_the_remedy(tmp_path: Path) -> None:
    failure = install_agent("claude", tmp_path / "cache", npm=str(tmp_path / "no-npm"))
    assert isinstance(failure, InstallFailure)
    assert failure.exit_code == EXIT_UNREACHABLE
    assert "install Node" in failure.message


def test_an_npm_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    failure = install_agent("claude", tmp_path / "c", npm=fake_npm(tmp_path, "exec sleep 60"), timeout_s=0.2)
    assert isinstance(failure, InstallFailure)
    assert failure.exit_code == EXIT_UNREACHABLE


def test_an_install_of_the_wrong_version_or_without_its_binary_is_refused(tmp_path: Path) -> None:
    for body, words in (
        (good_npm(tmp_path / "a", "1.0.0"), "1.0.0"),
        (fake_npm(tmp_path / "b", ""), "without its binary"),
    ):
        failure = install_agent("claude", tmp_path / "cache", npm=body)
        assert isinstance(failure, InstallFailure)
        assert words in failure.message


def test_an_unknown_agent_and_an_unknown_platform_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = install_agent("nobody", tmp_path)
    assert isinstance(unknown, InstallFailure)
    assert unknown.exit_code == EXIT_USAGE
    monkeypatch.setattr(install, "platform_key", lambda: "plan9-mips")
    failure = install_agent("claude", tmp_path)
    assert isinstance(failure, InstallFailure)
    assert "plan9-mips" in failure.message


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    failure = install_agent("claude", tmp_path / "file")
    assert isinstance(failure, InstallFailure)
    assert "set XDG_CACHE_HOME" in failure.message


def test_the_command_prints_one_line_and_the_exit_code_of_its_reason(tmp_path: Path) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "tether_agents", *words]
        env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
        return done.returncode, done.stdout, done.stderr

    agents = ("--agents-dir", str(tmp_path / "agents"))
    code, _, errors = run("install", "claude", "--npm", "/no/npm", *agents)
    assert (code, errors.count("\n")) == (EXIT_UNREACHABLE, 1)
    code, output, _ = run("install", "claude", "--npm", good_npm(tmp_path), *agents)
    assert (code, output.count("\n")) == (0, 1)
    code, output, _ = run("find", "claude", *agents)
    assert code == 0
    assert f"claude {PIN.version} " in output
    assert run("find", "nobody")[0] == EXIT_FAILED


def test_the_cache_follows_the_xdg_rules() -> None:
    assert locate.cache_root({"HOME": "/h", "XDG_CACHE_HOME": "/x"}) == Path("/x/tether/agents")
    assert locate.cache_root({"HOME": "/h", "XDG_CACHE_HOME": "relative"}) == Path("/h/.cache/tether/agents")
    assert locate.cache_root({"HOME": "/h"}) == Path("/h/.cache/tether/agents")


def script_pin() -> Pin:
    """One that needs the Node that comes with it."""
    return load_pins()["acp:claude"]


def node_npm(folder: Path, version: str) -> str:
    """An npm that installs a Node, which prints the version that stands in the script it is given."""
    pin = script_pin()
    binary, script = pin.binaries[locate.platform_key()], pin.arguments[0]
    write = f"mkdir -p $PREFIX/{Path(binary).parent} $PREFIX/{Path(script).parent}; echo {version} > $PREFIX/{script}"
    return fake_npm(folder, f"{write}; printf '#!/bin/sh\\ncat $1\\n' > $PREFIX/{binary}; chmod +x $PREFIX/{binary}")


def test_a_script_is_installed_with_its_node_and_found_as_a_whole_command(tmp_path: Path) -> None:
    pin = script_pin()
    env = environment(tmp_path)
    found = install_agent(pin.name, locate.cache_root(env), npm=node_npm(tmp_path, pin.version))
    assert isinstance(found, FoundAgent)
    folder = locate.cache_root(env) / "acp-claude" / pin.version
    assert found.command == (str(folder / pin.binaries[locate.platform_key()]), str(folder / pin.arguments[0]))
    assert find_agent(pin.name, environment=env) == found
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.endswith(" ".join([f"{pin.package}@{pin.version}", *pin.extras[locate.platform_key()]]))
    (folder / pin.arguments[0]).unlink()
    assert isinstance(find_agent(pin.name, environment=env), Problem), "a Node alone is no agent"


def test_a_users_own_install_of_a_script_needs_no_node_of_ours(tmp_path: Path) -> None:
    pin = script_pin()
    path = executable(tmp_path / "bin" / pin.command, f"echo {pin.version}")
    found = find_agent(pin.name, environment=environment(tmp_path))
    assert isinstance(found, FoundAgent)
    assert found.command == (str(path),)


def test_every_version_that_npm_is_asked_for_is_exact() -> None:
    for pin in load_pins().values():
        for extra in pin.extras.get(locate.platform_key(), ()):
            assert all(part.isdecimal() for part in extra.rpartition("@")[2].split("."))
        assert set(pin.extras) <= set(pin.binaries)


def test_without_a_name_the_usual_agents_are_installed_and_all_of_them_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(name: str, root: Path | None, *, npm: str) -> FoundAgent:
        return FoundAgent(name, tmp_path, "1.0.0", "cache", "1.0.0")

    monkeypatch.setattr(command, "install_agent", install)
    assert command.main(["install"]) == 0
    usual = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert usual == ["claude", "codex", "acp:opencode"]
    assert command.main(["install", "all"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(load_pins())


def test_pins_are_frozen() -> None:
    assert isinstance(PIN, Pin)
    with pytest.raises(AttributeError):
        PIN.version = "other"  # type: ignore[misc]


def test_a_script_of_npm_on_path_gives_way_to_the_native_binary_that_it_would_start(tmp_path: Path) -> None:
    """The script would be killed alone, and what it started go on."""
    pin = load_pins()["codex"]
    package = tmp_path / "lib" / "node_modules" / "@openai" / "codex"
    native = locate.installed_binary(pin, package)
    assert native is not None
    script = package / "bin" / "codex.js"
    for path in (native, script):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho codex-cli {pin.version}\n")
        path.chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "codex").symlink_to(script)
    found = find_agent("codex", environment=environment(tmp_path))
    assert isinstance(found, FoundAgent)
    assert (found.path, found.source) == (native, "PATH")
