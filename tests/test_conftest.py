"""The rule that tests may not skip where services are required, tried on small made-up suites."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = "pytester"

SUITE = """
import pytest

@pytest.mark.skipif(True, reason="no service here")
def test_by_mark(): pass

def test_by_call(): pytest.skip("no engine here")

@pytest.mark.gpu
def test_gpu(): pytest.skip("one GPU only")

@pytest.mark.xfail(strict=True)
def test_known_fault(): raise ValueError

def test_runs(full, require_services): assert not full
"""


@pytest.fixture
def suite(pytester):
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = gpu: GPU\n")
    pytester.makepyfile(SUITE)
    return pytester


def outcomes(suite: pytest.Pytester, *options: str) -> dict[str, int]:
    return suite.runpytest_subprocess("-p", "no:cacheprovider", *options).parseoutcomes()


def test_what_is_missing_skips(suite):
    assert outcomes(suite) == {"passed": 1, "skipped": 3, "xfailed": 1}


def test_required_services_may_not_skip_and_gpus_may(suite):
    done = suite.runpytest_subprocess("--require-services")
    assert done.parseoutcomes() == {
        "passed": 1,
        "failed": 1,
        "errors": 1,  # the skip by mark, which happens before the test
        "skipped": 1,
        "xfailed": 1,
    }
    done.stdout.fnmatch_lines(["*allows no skip here: *no service here*"])


def test_a_module_that_skips_itself_fails_too(pytester, suite):
    pytester.makepyfile(test_other="import pytest\npytest.importorskip('not_there_at_all')")
    assert outcomes(suite, "test_other.py") == {"skipped": 1}
    assert outcomes(suite, "test_other.py", "--require-services") == {"errors": 1}
