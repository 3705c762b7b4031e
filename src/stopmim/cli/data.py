"""``stopmim check``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from stopmim.base.errors import DataError
from stopmim.cli.options import Changes, DataSource, PresetOrFile, option


@dataclass(frozen=True)
class Check:
    """Look for broken images and duplicates, and estimate what training would cost."""

    data: DataSource
    preset: PresetOrFile = "vit_b16_stop"
    fix_list: Annotated[Path | None, option("FILE.jsonl")] = None
    """write a list of broken images, for pretrain --data.skip and eval --skip"""
    limit: Annotated[int | None, option("INT")] = None
    """read only this many images of each split, evenly spaced"""
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        from stopmim.data.check import check

        report = check(
            self.data, self.preset, self.changes, fix_list=self.fix_list, limit=self.limit
        )
        print(report.text())
        if report.problem:
            raise DataError(report.problem)
