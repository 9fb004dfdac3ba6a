"""Telling a living process from a dead one and from a later one with the same id."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

from armillary.store.writer_process import Process


def test_this_process_is_there() -> None:
    assert not Process.this().is_gone


def test_a_process_is_gone_once_it_ended_even_before_its_parent_looks() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    there = replace(Process.this(), pid=child.pid, born=0)
    assert not there.is_gone
    child.kill()
    give_up = time.monotonic() + 10
    while not there.is_gone:  # a zombie, as nobody has waited for it
        assert time.monotonic() < give_up
    child.communicate()
    assert there.is_gone


def test_a_later_process_with_the_same_id_is_another() -> None:
    me = Process.this()
    assert replace(me, born=me.born + 1).is_gone


def test_of_other_machines_nothing_is_known() -> None:
    assert not Process(pid=2**22 + 1, born=1, host="another-machine").is_gone
