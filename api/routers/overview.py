"""Everything at once: what the page and dashboards show."""

from __future__ import annotations

import contextlib

from fastapi import APIRouter

from weightdepot.api.dependencies import ControllerDep
from weightdepot.api.openapi import problems
from weightdepot.api.report import ModelReport, report_on
from weightdepot.api.schemas import answers
from weightdepot.store.errors import UnknownModel

router = APIRouter(tags=["models"])


@router.get("/overview", summary="Everything at once", responses=problems())
async def overview(controller: ControllerDep) -> answers.Overview:
    """All models with their groups, and in words what is stuck and why."""
    index = controller.index
    found: list[ModelReport] = []
    for name in sorted(await index.models()):
        with contextlib.suppress(UnknownModel):  # forgotten since the names were listed
            found.append(report_on(await index.model(name), await index.groups(name)))
    reports = tuple(answers.Report.model_validate(report) for report in found)
    return answers.Overview(run=controller.settings.run, models=reports)
