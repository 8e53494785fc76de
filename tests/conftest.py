"""Options and rules of the whole test-suite.

A machine may lack a GPU, a vLLM or a service, and then the tests that need one skip.
``--require-services`` is for machines that should have them: there, only GPU tests may skip.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite(
    *("copy_suite", "mode_suite", "fingerprint_suite", "layout_suite"),
    *("transfer_suite", "engine_suite", "e2ekit", "tier_rig"),
)

# How fast this machine generates examples says nothing about the code under test.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "full", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-services",
        action="store_true",
        help="fail where a service, package or engine is missing, instead of skipping",
    )
    parser.addoption(
        "--full", action="store_true", help="long sizes, and many more random examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile", default=None):
        settings.load_profile("full" if config.getoption("--full") else "ci")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether long sizes were asked for."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def require_services(request: pytest.FixtureRequest) -> bool:
    """Whether whatever a test needs must be there."""
    return bool(request.config.getoption("--require-services"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if not item.get_closest_marker("gpu") and not hasattr(report, "wasxfail"):
        _refuse_skip(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    _refuse_skip(collector.config, report)
    return report


def _refuse_skip(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and config.getoption("--require-services"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"--require-services allows no skip here: {reason}"
