"""The roll call: every rank says who it is, and knows all the others, before a process group is formed.

1. Each process *claims* its rank in the store: host, process, world size, GPUs, and a nonce of its own. A claim can
   be made once, so two processes with one rank find out about each other.
2. Once all claims are there, each rank *confirms* by writing a digest of all nonces. Only processes that live now
   can confirm the nonces of now: a store that a killed run left behind never passes for a world.
3. Each takes its device, which imports torch and can fail, and *stands by*: ranks wait here for one another, where
   it can be seen that one has ended, and not in the process group, which would wait for its time-out.
4. The process group then uses keys under that digest, which no other world shares.

A process that finds a fault writes it under the nonce of each rank that it knows of, so that they all fail with one
sentence, and none waits for its time-out. A process that leaves takes its claim back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from ..errors import AbsentError, RequestError
from ..failures import RankLostError
from .claims import Claim, check_reach, check_together, digest
from .peers import Peers, present
from .stores import Meeting

_LOOK_S = 0.05
_LIVENESS_S = 1.0  # between looks at whether the processes that we can see are alive
_HEAR_S = 5.0  # for a process on another host to answer that it lives
_LEAVE_S = 10.0
_ANSWER_S = 5.0  # for the store, however short --timeout is


class StartMovedError(Exception):
    """Says that the ranks are being started anew, and that this one, which has just come, belongs to that start."""


class RollCall:
    """One process's part in the roll call over an open store."""

    def __init__(self, meeting: Meeting, claim: Claim, *, clears: bool = False) -> None:
        """`clears` takes the places of processes that are dead or do not answer, where they are refused otherwise."""
        self._meeting = meeting
        self._store = meeting.store
        self._mine = claim
        self._clears = clears
        self._written: list[str] = []
        self._left = threading.Event()
        self._answers: threading.Thread | None = None

    def take(self, timeout_s: float) -> Peers:
        """Return all ranks, once all have confirmed that they are (*collective*).

        Raises `StartMovedError` where the ranks are started anew meanwhile: the caller opens the store again.
        Raises `RequestError`, on every rank that can know, if a rank is missing after `timeout_s` seconds, claimed
        twice, or dead, or if ranks were started with different world sizes, accelerators, or the same GPU.
        """
        deadline = time.monotonic() + timeout_s
        # Who serves the store may be stopped, and torch would wait for it without end.
        self._store = self._meeting.bounded(max(timeout_s, _ANSWER_S))
        try:
            self._claim()
            claims = self._wait(deadline, timeout_s)
            if self._meeting.file:
                self._answers = threading.Thread(target=self._answer, daemon=True, name="roll call")
                self._answers.start()
            return Peers(self._meeting, claims, self._mine)
        except StartMovedError:
            self.leave(clean=False)
            raise
        except RequestError as error:
            self._spread(error)
            self.abandon()
            raise
        except KeyboardInterrupt:
            self._spread(
                AbsentError(
                    f"{self._meeting.where}: rank {self._mine.rank} ({self._mine.who}) was stopped while it waited for "
                    "the others; start all ranks again."
                )
            )
            self.abandon()
            raise
        except RuntimeError as error:  # the store's own: its server has gone
            raise AbsentError(
                f"{self._meeting.where}: the store went away during the roll call ({_brief(error)}); "
                "rank 0, or the agent that serves it, has ended: its own message tells why."
            ) from error

    def stand_by(self, peers: Peers, timeout_s: float) -> None:
        """Return once all ranks of the roll call are about to form the process group (*collective*).

        Raises `RankLostError` if one has ended or left since, or is not there after `timeout_s` seconds.
        """
        claims = peers.claims
        keys = [f"standby/{digest(claims)}/{claim.rank}" for claim in claims]
        deadline = time.monotonic() + timeout_s
        next_look = time.monotonic() + _LIVENESS_S
        try:
            self._store.set(keys[self._mine.rank], "")
            while not self._store.check(keys):
                if time.monotonic() >= min(next_look, deadline):
                    absent = [claim for claim, key in zip(claims, keys, strict=True) if not self._store.check([key])]
                    self._check_absent(absent, late=time.monotonic() >= deadline, timeout_s=timeout_s)
                    next_look = time.monotonic() + _LIVENESS_S
                time.sleep(_LOOK_S)
        except RuntimeError as error:  # the store's own: its server has gone
            raise peers.server_lost() from error

    def _check_absent(self, absent: Sequence[Claim], *, late: bool, timeout_s: float) -> None:
        """Raise if one of the ranks that do not stand by yet never will, or is too late."""
        here = {claim.nonce for claim in self._claims()}
        for claim in absent:
            gone = claim.nonce not in here or claim.is_dead()
            if gone or late:
                how = "ended before training began" if gone else f"did not get ready within --timeout {timeout_s:g} s"
                raise RankLostError(
                    f"Rank {self._mine.rank}: rank {claim.rank} ({claim.who}) came, but {how}: its own message says "
                    "why; then start all ranks again."
                )

    def abandon(self) -> None:
        """Leave before training began, and stay until the others have heard of it where they would lose the store."""
        self.leave(clean=False)
        if self._meeting.hosted:
            with contextlib.suppress(RuntimeError):
                _until(lambda: not self._claims(), _HEAR_S)

    def leave(self, *, clean: bool) -> None:
        """Take this rank's claim back.

        After a clean end, rank 0 stays until all have left, since it serves the store or removes the file, and those
        who met at a file stay until it is gone, so that the next run may follow at the same place. After a failure
        nobody waits; a file then stays behind without claims, and the next run can use it.
        """
        self._left.set()
        if self._answers:
            self._answers.join(_LEAVE_S)
        if not self._meeting.is_open():
            return
        with contextlib.suppress(RuntimeError, OSError):
            # Emptied, not deleted: torch's stores wait for a key that is not there, and for a file that is not there.
            for key in self._written:
                self._store.compare_set(key, self._mine.to_json(), "")
            self._written.clear()
            file = self._meeting.file
            if clean and self._mine.rank == 0:
                deserted = _until(lambda: not self._claims(), _LEAVE_S)
                if file and deserted:
                    file.unlink(missing_ok=True)
            elif clean and file:
                _until(lambda: not file.exists(), _LEAVE_S)

    def _claim(self) -> None:
        mine, where = self._mine, self._meeting.where
        self._take(
            "size",
            lambda first: first.size == mine.size,
            lambda first: (
                f"{where}: the ranks disagree on the world size: rank {first.rank} ({first.who}) says {first.size}, "
                f"rank {mine.rank} ({mine.who}) says {mine.size}; give every rank the same --world-size."
            ),
        )
        self._take(
            f"claim/{mine.rank}",
            lambda holder: False,
            lambda holder: (
                f"{where}: rank {mine.rank} is claimed twice, by {holder.who} and by {mine.who}; "
                "give each process its own --rank, and each run its own meeting place."
            ),
        )

    def _take(self, key: str, agrees: Callable[[Claim], bool], contradiction: Callable[[Claim], str]) -> None:
        """Put this rank's claim under the key, unless one is there that agrees with it; raise if one does not."""
        expected = ""
        while True:
            there = self._store.compare_set(key, expected, self._mine.to_json()).decode()
            if not there:  # who was there has just left
                expected = ""
                continue
            holder = Claim.from_json(there)
            if holder.nonce == self._mine.nonce:
                self._written.append(key)
                return
            if agrees(holder):
                return
            sentence = contradiction(holder)
            if not self._is_gone(holder, sentence):
                raise RequestError(sentence)
            if not self._clears:
                raise RequestError(self._remains(holder))
            expected = there  # so that of several who come at once, one alone takes the place

    def _is_gone(self, holder: Claim, sentence: str) -> bool:
        """Return whether a process has ended, or does not answer; if it is still in its roll call, it hears."""
        fault, heard = f"fault/{holder.nonce}", f"heard/{holder.nonce}"
        self._store.set(heard, "")
        self._store.set(fault, _told(RequestError(sentence)))
        dead = holder.is_dead()
        if dead is not None:
            return dead
        # A store that a process serves ends with that process: who has come there trains by now, and does not listen.
        return not _until(lambda: bool(self._store.get(heard)), _HEAR_S) and self._meeting.file is not None

    def _remains(self, holder: Claim) -> str:
        file = self._meeting.file
        remedy = (
            f"remove {file} or give every rank --clear-meeting" if file else "start all ranks anew, or on another port"
        )
        return (
            f"{self._meeting.where} is left over from another run: {holder.who} was its rank {holder.rank} of "
            f"{holder.size} and is no more, or does not answer; if that run has ended, {remedy}, and start again."
        )

    def _wait(self, deadline: float, timeout_s: float) -> tuple[Claim, ...]:
        claims: tuple[Claim, ...] = ()
        confirmed: list[str] = []
        next_look = time.monotonic()
        starts = self._meeting.starts
        while True:
            self._heed()
            if starts is not None and starts.has_moved():
                raise StartMovedError
            if not confirmed:
                claims = self._all_claims()
                confirmed = self._confirm(claims)
            if confirmed and self._store.check(confirmed):
                return claims
            if time.monotonic() >= next_look:
                self._look_for_dead()
                if self._all_claims() != claims:  # the place of one that was dead is taken
                    confirmed = []
                next_look = time.monotonic() + _LIVENESS_S
            if time.monotonic() >= deadline:
                absent = self._absent(confirmed, timeout_s)
                self._heed()  # who gave up first has told the others before it left, and is not among the absent
                raise AbsentError(absent)
            time.sleep(_LOOK_S)

    def _all_claims(self) -> tuple[Claim, ...]:
        """Return the claims of all ranks; empty while one is missing."""
        if not self._store.check([f"claim/{rank}" for rank in range(self._mine.size)]):
            return ()
        claims = self._claims()
        return claims if len(claims) == self._mine.size else ()

    def _confirm(self, claims: Sequence[Claim]) -> list[str]:
        """Confirm that these are all ranks; return the keys by which each does, none if they are not there."""
        if not claims:
            return []
        try:
            check_together(claims)
            check_reach(claims, self._mine)
        except RequestError as error:  # others may find another one of their own at this moment: one is told by all
            told = self._store.compare_set(f"refused/{digest(claims)}", "", str(error)).decode()
            raise RequestError(told) from error
        keys = [f"ready/{digest(claims)}/{claim.rank}" for claim in claims]
        self._store.set(keys[self._mine.rank], self._mine.nonce)
        return keys

    def _heed(self) -> None:
        """Raise the fault that another rank has told this one."""
        fault = f"fault/{self._mine.nonce}"
        if self._store.check([fault]):
            self._store.set(f"heard/{self._mine.nonce}", "yes")
            raise _fault(self._store.get(fault).decode())

    def _answer(self) -> None:
        """Until this rank leaves, say that it lives to those who come to its place in the file and cannot see it."""
        fault, heard = f"fault/{self._mine.nonce}", f"heard/{self._mine.nonce}"
        with contextlib.suppress(RuntimeError):
            while not self._left.wait(_LIVENESS_S) and self._meeting.is_open():
                if self._store.check([fault, heard]) and not self._store.get(heard):
                    self._store.set(heard, "yes")

    def _look_for_dead(self) -> None:
        for claim in self._claims():
            if claim.is_dead():
                if not self._clears:
                    raise RequestError(self._remains(claim))
                self._store.compare_set(f"claim/{claim.rank}", claim.to_json(), "")

    def _absent(self, confirmed: Sequence[str], timeout_s: float) -> str:
        size = self._mine.size
        here = {claim.rank for claim in self._claims()}
        if confirmed:
            silent = [rank for rank, key in enumerate(confirmed) if not self._store.check([key])]
            came, verb = size - len(silent), "confirmed the roll call"
        else:
            silent = [rank for rank in range(size) if rank not in here]
            came, verb = len(here), "came"
        names = ", ".join(map(str, silent[:16])) + (" …" if len(silent) > 16 else "")
        remedy = ""
        if file := self._meeting.file:  # at one that is left over, a rank without the flag is refused
            without = "" if self._clears else f"remove {file} or "
            remedy = f", or, if an earlier run has left it, {without}give every rank --clear-meeting"
        return (
            f"{self._meeting.where}: {came} of {size} ranks {verb} within --timeout {timeout_s:g} s; missing: "
            f"rank {names}; start every rank, or raise --timeout{remedy}{self._meeting.caution}."
        )

    def _spread(self, error: RequestError) -> None:
        """Tell every rank that has come."""
        with contextlib.suppress(RuntimeError):
            for claim in self._claims():
                if claim.nonce != self._mine.nonce:
                    self._store.set(f"fault/{claim.nonce}", _told(error))

    def _claims(self) -> tuple[Claim, ...]:
        return present(self._store, self._mine.size)


def _told(error: RequestError) -> str:
    """Return the error as `_fault` reads it."""
    return f"{type(error).__name__}\n{error}"


def _fault(told: str) -> RequestError:
    kind, _, sentence = told.partition("\n")
    return (AbsentError if kind == AbsentError.__name__ else RequestError)(sentence)


def _until(holds: Callable[[], bool], limit_s: float) -> bool:
    """Return True as soon as `holds()`, False if it does not within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def _brief(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
