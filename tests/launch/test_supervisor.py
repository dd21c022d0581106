from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.launch.supervised import Supervise, is_running, wait_until

RELAY = [("router", "steady"), ("prefill-0", "steady"), ("decode-0", "steady")]


def test_reports_the_addresses_once_every_child_is_ready(supervise: Supervise) -> None:
    supervisor = supervise(RELAY)
    supervisor.wait_for("all ready")
    assert '"router": "http://router"' in supervisor.output()
    assert '"decode-0": "http://decode-0"' in supervisor.output()


def test_marks_lines_of_children_with_their_name(supervise: Supervise) -> None:
    supervisor = supervise(RELAY)
    supervisor.wait_for("all ready")
    assert "[prefill-0] prefill-0 has pid" in supervisor.output()
    assert "[decode-0] loading 0.0 MB of weights" in supervisor.output()


def test_a_child_that_cannot_start_ends_the_supervisor_with_its_own_error_and_status(supervise: Supervise) -> None:
    supervisor = supervise([("router", "steady"), ("prefill-0", "mute"), ("decode-0", "broken")])
    assert supervisor.wait() == 2
    assert supervisor.output().endswith("error: decode-0: no such model: llama-17\n")
    assert supervisor.output().count("llama-17") == 1
    assert supervisor.running_pids() == []


def test_a_child_that_is_killed_while_it_starts_is_told_of_as_of_a_lack_of_memory(supervise: Supervise) -> None:
    supervisor = supervise([("router", "mute"), ("prefill-0", "killed")])
    assert supervisor.wait() == 1
    assert "error: prefill-0: was killed by SIGKILL while it started" in supervisor.output()
    assert "load 2.00 GiB of weights each" in supervisor.output()
    assert "--max-model-len" in supervisor.output()


def test_children_that_are_not_ready_in_time_are_named(supervise: Supervise) -> None:
    supervisor = supervise([("router", "mute"), ("prefill-0", "mute")], start_timeout_s=0.2)
    assert supervisor.wait() == 1
    assert "error: not ready after 0.2 s: router, prefill-0\n" in supervisor.output()
    assert supervisor.running_pids() == []


def test_a_killed_child_is_started_again(supervise: Supervise) -> None:
    supervisor = supervise([("router", "steady")])
    supervisor.wait_for("all ready")
    os.kill(supervisor.pids()[0], signal.SIGKILL)
    supervisor.wait_for("router is ready again")
    assert "router stopped: was killed by SIGKILL; starting it again now" in supervisor.output()
    assert len(supervisor.pids()) == 2
    assert supervisor.running_pids() == supervisor.pids()[1:]


def test_restarts_of_a_child_that_keeps_dying_come_slower(supervise: Supervise, tmp_path: Path) -> None:
    supervisor = supervise([("router", "steady"), ("decode-0", "mayfly", str(tmp_path / "dies"))])
    supervisor.wait_for("all ready")
    (tmp_path / "dies").touch()
    supervisor.wait_for("decode-0 stopped: exited with status 3; starting it again now")
    supervisor.wait_for("exited with status 3; starting it again in 0.05 s")
    supervisor.wait_for("exited with status 3; starting it again in 0.1 s")
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.wait() == 0


def test_a_child_that_was_drained_stays_away(supervise: Supervise, tmp_path: Path) -> None:
    supervisor = supervise([("router", "steady"), ("decode-0", "drained", str(tmp_path / "drained"))])
    supervisor.wait_for("all ready")
    (tmp_path / "drained").touch()
    supervisor.wait_for("decode-0 was drained, and stays away")
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.wait() == 0
    assert len(supervisor.pids()) == 2, "it was not started again"


def test_when_all_children_were_drained_the_supervisor_ends(supervise: Supervise, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    supervisor = supervise([("decode-0", "drained", str(first)), ("decode-1", "drained", str(second))])
    supervisor.wait_for("all ready")
    second.touch()
    supervisor.wait_for("decode-1 was drained, and stays away")
    assert len(supervisor.running_pids()) == 1
    first.touch()
    assert supervisor.wait() == 0


def test_a_restart_that_fails_shows_why_and_is_tried_again(supervise: Supervise, tmp_path: Path) -> None:
    supervisor = supervise([("router", "steady"), ("decode-0", "breaks", str(tmp_path / "broken"))])
    supervisor.wait_for("all ready")
    (tmp_path / "broken").touch()
    supervisor.wait_for("decode-0 stopped: no such model: llama-17; starting it again in 0.05 s")


def test_a_child_that_always_fails_is_given_up_and_the_others_go_on(supervise: Supervise, tmp_path: Path) -> None:
    dies = str(tmp_path / "dies")
    supervisor = supervise([("router", "steady"), ("decode-0", "mayfly", dies), ("decode-1", "steady")])
    supervisor.wait_for("all ready")
    (tmp_path / "dies").touch()
    supervisor.wait_for("decode-0 stopped 4 times in a row and is given up: exited with status 3")
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.wait() == 0


def test_when_a_whole_group_is_given_up_the_supervisor_ends_with_the_reason(
    supervise: Supervise, tmp_path: Path
) -> None:
    supervisor = supervise([("router", "steady"), ("decode-0", "mayfly", str(tmp_path / "dies"))])
    supervisor.wait_for("all ready")
    (tmp_path / "dies").touch()
    assert supervisor.wait() == 1
    reason = "error: decode-0 stopped 4 times in a row and is given up: exited with status 3\n"
    assert supervisor.output().endswith(reason)
    assert supervisor.running_pids() == []


def test_sigterm_drains_the_nodes_then_the_router_and_leaves_no_process(supervise: Supervise) -> None:
    supervisor = supervise(RELAY)
    supervisor.wait_for("all ready")
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.wait() == 0
    assert supervisor.output().endswith("[router] router drains\n")
    assert supervisor.output().count("drains") == 3
    assert len(supervisor.pids()) == 3
    assert supervisor.running_pids() == []


def test_ctrl_c_reaches_only_the_supervisor(supervise: Supervise) -> None:
    supervisor = supervise(RELAY)
    supervisor.wait_for("all ready")
    assert {os.getsid(pid) for pid in supervisor.pids()} == set(supervisor.pids())
    shown_before = supervisor.output()
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.wait() == 0
    own_lines = [line for line in supervisor.output()[len(shown_before) :].splitlines() if "drains" not in line]
    assert own_lines == ["[baton] stopping, within 60 s; a second signal ends all at once"]


def test_sighup_stops_children_that_have_nothing_to_reload(supervise: Supervise) -> None:
    supervisor = supervise(RELAY)
    supervisor.wait_for("all ready")
    supervisor.process.send_signal(signal.SIGHUP)
    assert supervisor.wait() == 0
    assert supervisor.output().count("drains") == 3


def test_sighup_is_passed_on_to_a_child_that_reloads_and_stops_nothing(supervise: Supervise) -> None:
    supervisor = supervise([("router", "reloads"), ("decode-0", "steady")])
    supervisor.wait_for("all ready")
    for number in (1, 2):
        supervisor.process.send_signal(signal.SIGHUP)
        supervisor.wait_for("[router] router reloads", num_times=number)
    assert supervisor.running_pids() == supervisor.pids()
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.wait() == 0
    assert len(supervisor.pids()) == 2


def test_sighup_waits_for_a_child_that_is_not_ready(supervise: Supervise, tmp_path: Path) -> None:
    supervisor = supervise([("router", "reloads", str(tmp_path / "may-begin")), ("decode-0", "steady")])
    supervisor.wait_for("has pid", num_times=2)
    supervisor.process.send_signal(signal.SIGHUP)
    (tmp_path / "may-begin").touch()
    supervisor.wait_for("[router] router reloads")
    supervisor.wait_for("all ready")
    assert len(supervisor.pids()) == 2


def test_a_signal_while_children_start_stops_them(supervise: Supervise) -> None:
    supervisor = supervise([("router", "steady"), ("prefill-0", "mute")])
    supervisor.wait_for("has pid", num_times=2)
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.wait() == 0
    assert "all ready" not in supervisor.output()
    assert supervisor.running_pids() == []


def test_a_child_that_ignores_sigterm_is_killed_when_time_is_up(supervise: Supervise) -> None:
    supervisor = supervise([("router", "steady"), ("decode-0", "stubborn")], stop_timeout_s=0.3)
    supervisor.wait_for("all ready")
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.wait() == 1
    assert "did not stop in time, killed now: decode-0" in supervisor.output()
    assert "[router] router drains" in supervisor.output()
    assert supervisor.running_pids() == []


def test_a_second_signal_kills_at_once(supervise: Supervise) -> None:
    supervisor = supervise([("router", "stubborn"), ("prefill-0", "steady"), ("decode-0", "stubborn")])
    supervisor.wait_for("all ready")
    supervisor.process.send_signal(signal.SIGTERM)
    supervisor.wait_for("prefill-0 drains")
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.wait() == 128 + signal.SIGTERM
    assert "left behind" not in supervisor.output()
    assert supervisor.running_pids() == []


def test_children_die_with_a_killed_supervisor(supervise: Supervise) -> None:
    supervisor = supervise([("router", "steady"), ("decode-0", "stubborn")])
    supervisor.wait_for("all ready")
    supervisor.process.kill()
    wait_until(lambda: supervisor.running_pids() == [], "the children of a killed supervisor to die")
    assert len(supervisor.pids()) == 2


def test_what_a_dead_child_started_dies_too(supervise: Supervise) -> None:
    supervisor = supervise([("router", "parent")])
    supervisor.wait_for("all ready")
    child, sleeper = supervisor.pids()
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not is_running(sleeper), "the child of a dead child to die")
