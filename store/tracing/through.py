"""The third tier: which tensors go through the loader itself at each update, so that the result is its own.

After a version's placements and fills are written, the loader is called again, with these tensors only. What
it then writes is found out by recording that very call. It must write, element by element, what it wrote in
the full run: where it writes something else (because the order of two tensors matters, or because of what it
does without being given one), the tensors concerned are given to it as well, until it does, in the end all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from weightdepot.store.tracing.content import UNDEFINED, Content, Fault, Old, Poison, Source
from weightdepot.store.tracing.memory import Entry
from weightdepot.store.tracing.recording import Loading, Recording, Target
from weightdepot.store.tracing.writing import Row, is_untouched

ROUNDS = 12  # calls of the loader with more and more tensors; then with all


@dataclass
class Through:
    """`given`: indices of the tensors for the loader, rising. `rest`: the parameters that such a call writes
    to, each with what is left for the layout to fill there (elements counted from the first one)."""

    given: tuple[int, ...] = ()
    rest: dict[str, list[Entry]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


Described = dict[str, tuple[Target, list[Row]]]


def settle(loading: Loading, first: Recording, described: Described) -> Through:
    """What the loader must do itself. Nothing, and no call of it, where all can be mapped.

    `described`: the parameters of the full run, each tie once.
    """
    problems = {
        name: [row.problem for row in rows if row.problem is not None]
        for name, (_, rows) in described.items()
    }
    problems = {name: found for name, found in problems.items() if found}
    result = Through()
    if not problems:
        return result
    result.faults = _hopeless(first, described, problems)
    hopeless = {f.parameter for f in result.faults}
    given: set[int] = set()
    for name, found in problems.items():
        for problem in found if name not in hopeless else ():
            concerned = first.recorder.numbers(problem.fault.tensors)
            if not concerned:
                concerned = sorted(first.recorder.history[described[name][0].number])
            for i in concerned:
                result.reasons.setdefault(i, problem.fault.text)
            given.update(concerned)
    everything = set(range(len(loading.tensors)))
    for attempt in range(ROUNDS + 1):
        second = loading.record(sorted(given))
        if second.faults:
            result.faults += [_again(f, loading, given) for f in second.faults]
            break
        comparison = _Comparison(first, second, given, hopeless)
        wanted = comparison.run(described)
        if not comparison.differing:
            result.rest = comparison.rest
            break
        if given == everything:
            text = "is not written alike when the loader is called a second time with the same tensors"
            result.faults += [Fault("load_weights", (), name, 0, text) for name in comparison.differing]
            break
        if not wanted or attempt == ROUNDS - 1:
            wanted = everything - given
        where = ", ".join(map(repr, list(comparison.differing)[:3]))
        for i in wanted:
            result.reasons.setdefault(i, f"shares {where} with tensors that go through the loader")
        given |= wanted
    result.given = tuple(sorted(given))
    return result


def _hopeless(first: Recording, described: Described, problems: dict[str, list[Poison]]) -> list[Fault]:
    """Parameters whose new values depend on former ones, which an update would find changed."""
    written = {number for number, history in first.recorder.history.items() if history}
    faults: dict[Fault, None] = {}
    for name, found in problems.items():
        for problem in found:
            if problem.old & (written | {described[name][0].number}):
                reason = f"depends on what a parameter held before the loader ran: {problem.fault.reason}"
                faults[replace(problem.fault, tier=0, reason=reason)] = None
    return list(faults)


def _again(fault: Fault, loading: Loading, given: set[int]) -> Fault:
    names = [loading.tensors[i].name for i in sorted(given)]
    shown = ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    reason = (
        f"{fault.reason}, when it is called again with only what must go through it ({shown or 'nothing'})"
    )
    return replace(fault, tensors=fault.tensors or tuple(names), reason=reason)


class _Comparison:
    """The full run against a run with `given` only, element by element."""

    def __init__(self, first: Recording, second: Recording, given: set[int], ignored: set[str]) -> None:
        self.first, self.second, self.given, self.ignored = first, second, given, ignored
        self.differing: dict[str, None] = {}  # those in which the two differ
        self.rest: dict[str, list[Entry]] = {}

    def run(self, described: Described) -> set[int]:
        """The tensors that the loader must be given as well."""
        wanted: set[int] = set()
        again = {t.name: t for t in self.second.targets}
        for name, (target, rows) in described.items():
            other = again[name]
            written = bool(other.place.memory.entries)
            if name in self.ignored or not (written or any(row.problem for row in rows)):
                continue
            concerned = self._parameter(target, rows, other)
            if concerned is None:
                continue
            self.differing[name] = None
            new = concerned - self.given
            if not new:
                histories = self.first.recorder.history, self.second.recorder.history
                new = {i for h in histories for i in h[target.number]} - self.given
            wanted |= new
        return wanted

    def _parameter(self, target: Target, rows: list[Row], other: Target) -> set[int] | None:
        """None where the two agree, and then `rest` is set; else the tensors concerned."""
        concerned: set[int] = set()
        differs = self._moves_old(other)
        rest: list[Entry] = []
        touched = False
        base = target.place.offset
        for entry, _, problem in rows:
            # where elements come from is compared as well; anything else is the same wherever it lies
            moved = isinstance(entry.content, Old) and problem is not None
            mapped = moved or isinstance(entry.content, Source | Poison)
            image = entry.image if mapped else entry.start
            steps = tuple(t if mapped else s for _, s, t in entry.dims)
            view = other.place._replace(
                offset=entry.start + base,
                shape=tuple(n for n, _, _ in entry.dims),
                strides=tuple(s for _, s, _ in entry.dims),
            )
            for part in self.second.recorder.read(view, image, steps, origin=base):
                if part.content == other.place.memory.initial:  # not written
                    if problem is not None:
                        differs = True
                        concerned |= self._tensors(self.first, entry.content)
                    else:
                        dims = tuple((n, here, there) for n, there, here in part.dims)
                        rest.append(Entry(part.image - base, part.start, dims, entry.content))
                    continue
                touched = True
                if entry.content == UNDEFINED == part.content:  # left, by both
                    rest.append(part._replace(image=part.start))
                    continue
                same = _same(entry.content, part.content)
                if same and mapped:
                    same = part.start == part.image and all(a == b for n, a, b in part.dims if n > 1)
                if not same:
                    differs = True
                    concerned |= self._tensors(self.first, entry.content)
                    concerned |= self._tensors(self.second, part.content)
        if differs:
            return concerned
        if touched:
            self.rest[target.name] = rest
        return None

    def _moves_old(self, target: Target) -> bool:
        """Whether the second run leaves a parameter's former values in other places of it."""
        entries = self.second.recorder.read(target.place, origin=target.place.offset)
        return any(e.content == target.place.memory.initial and not is_untouched(e, target) for e in entries)

    @staticmethod
    def _tensors(run: Recording, content: Content) -> set[int]:
        if isinstance(content, Source):
            return {content.tensor}
        return set(run.recorder.numbers(content.fault.tensors)) if isinstance(content, Poison) else set()


def _same(a: Content, b: Content) -> bool:
    if isinstance(a, Poison) and isinstance(b, Poison):
        return a.how == b.how
    return a == b
