"""The application: routes, problems and what they stand on. No state outside of the app itself."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from weightdepot.api import openapi, page, problems, reference
from weightdepot.api.access import Access, Authentication
from weightdepot.api.bodies import BodyLimit
from weightdepot.api.controller import running
from weightdepot.api.dependencies import AccessCheck, RunCheck
from weightdepot.api.index import open_index
from weightdepot.api.metrics import Metrics
from weightdepot.api.release import release
from weightdepot.api.routers import (
    events,
    groups,
    health,
    layouts,
    members,
    metrics,
    models,
    operations,
    overview,
    plans,
    rounds,
    versions,
)
from weightdepot.api.settings import Settings
from weightdepot.api.traced import Traced
from weightdepot.store.index.index import Index

RESOURCES = (layouts, models, overview, operations, members, versions, plans, groups, rounds, events)


def create_app(settings: Settings, index: Index | None = None) -> FastAPI:
    """The controller as an ASGI application.

    `index` stays the caller's; without one the app opens its own when it starts (an embedded one where
    the settings name no Redis) and closes it when it stops. Raises InvalidRequest for settings that cannot
    work, such as a tokens file that is none.
    """
    access = Access(settings.tokens, settings.open_reading, settings.run)
    counted = Metrics(settings.run)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            used = index if index is not None else await stack.enter_async_context(open_index(settings))
            app.state.controller = await stack.enter_async_context(running(settings, used, access, counted))
            try:
                yield
            finally:
                del app.state.controller

    app = FastAPI(
        title="weightdepot",
        summary="Versions of reinforcement-learning weights: who publishes, who holds, who may read.",
        description=openapi.DESCRIPTION,
        version=release(),
        openapi_tags=openapi.TAGS,
        lifespan=lifespan,
        redirect_slashes=False,
        # every route that is included asks for a role, unless it says that it is open
        dependencies=[AccessCheck],
        docs_url=None,  # FastAPI's loads its scripts from elsewhere
        redoc_url=None,
        generate_unique_id_function=_operation_id,
    )
    problems.install(app, counted.problem)
    app.add_middleware(BodyLimit, limit=settings.limits.body)
    app.add_middleware(Authentication, access=access)
    app.add_middleware(Traced)  # the last one added is asked first
    app.include_router(health.router, prefix="/v1")
    app.include_router(metrics.router, dependencies=[RunCheck])
    v1 = APIRouter(prefix="/v1", dependencies=[RunCheck])
    for resource in RESOURCES:
        v1.include_router(resource.router)
    app.include_router(v1)
    openapi.install(app, [health.router, metrics.router, *(resource.router for resource in RESOURCES)])
    reference.install(app)
    page.install(app)
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name
