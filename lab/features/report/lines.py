"""The lines of a report, sorted by how they are shown."""

from __future__ import annotations

from dataclasses import dataclass

from lab.core.lines import Lines, ResultLine
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.show import comparison, table


@dataclass(frozen=True)
class ReportLines:
    """Runs and requests to servers, and findings, which are neither."""

    common: list[Record]  # runs whose results are in the common tables
    timed: list[Record]  # of them, those with times; sessions of one setup are told apart
    special: list[Record]  # runs whose results have tables of their own
    requests: list[RequestRecord]  # that ran alone
    requests_of_experiments: list[RequestRecord]
    findings: list[ResultLine]

    @property
    def answered(self) -> list[RequestRecord]:
        return [request for request in self.requests if request.is_good]

    @property
    def of_parts(self) -> list[Record]:
        """Special runs that no finding of their session stands for."""
        described = {finding.session for finding in self.findings}
        return [record for record in self.special if record.session not in described]

    @property
    def good(self) -> list[ResultLine]:
        """What was measured."""
        return [
            *self.timed,
            *self.of_parts,
            *self.answered,
            *self.requests_of_experiments,
            *self.findings,
        ]

    @property
    def shown(self) -> list[ResultLine]:
        """What the sections of kinds are made of."""
        return [
            *self.timed,
            *self.special,
            *self.findings,
            *self.requests,
            *self.requests_of_experiments,
        ]

    @property
    def setups(self) -> list[Record]:
        """The first run of each session and variant."""
        firsts: dict[tuple[str, str | None], Record] = {}
        for record in [*self.timed, *self.of_parts]:
            firsts.setdefault((record.session, record.run.variant), record)
        return list(firsts.values())


def sort_lines(lines: Lines) -> ReportLines:
    runs = table.of_engine(lines)
    common = [record for record in runs if not record.run.is_apart]
    separate = comparison.by_session(common) if common else []
    return ReportLines(
        common=common,
        timed=[record for record in separate if record.run.is_timed],
        special=[record for record in runs if record.run.is_apart],
        requests=table.alone(lines),
        requests_of_experiments=table.requests_of_experiments(lines),
        findings=[line for line in lines if not isinstance(line, Record | RequestRecord)],
    )
