"""Settings of the proposer: from the environment, and from vLLM's additional configuration."""

from __future__ import annotations

import pytest

from autospec.errors import ConfigurationError
from autospec.integrations.vllm.settings import Settings, read_settings


def test_without_any_there_is_no_store_and_the_policy_adapts() -> None:
    assert read_settings({}, {}) == Settings() == read_settings(None, {"PATH": "/bin", "AUTOSPEC_STORE": "x"})
    assert Settings().policy == "auto"


def test_all_of_them_can_be_in_the_environment() -> None:
    values = {
        "STORE": "sqlite:///a.db",
        "POLICY": "fixed:ngram:4",
        "DRAFTS": "ngram, suffix,",
        "SEGMENTS": "none",
        "CONTROL_SHARE": "0.25",
        "TRACE": "1",
        "RUN": "night",
        "NAME": "engine-1",
        "RESUME": "no",
        "PLAIN_SAMPLER": "no",
    }
    found = read_settings({}, {f"AUTOSPEC_VLLM_{name}": value for name, value in values.items()})
    assert found == Settings(
        *("sqlite:///a.db", "fixed:ngram:4", ("ngram", "suffix"), None, 0.25, 1.0, "night", "engine-1"),
        resume=False,
        plain_sampler=False,
    )


def test_the_environment_comes_first() -> None:
    given = {"autospec": {"policy": "off", "drafts": ["ngram"], "resume": False, "trace": 0.5}, "other": 1}
    found = read_settings(given, {"AUTOSPEC_VLLM_POLICY": "goodput"})
    assert found == Settings(policy="goodput", drafts=("ngram",), resume=False, trace=0.5)


@pytest.mark.parametrize(
    ("given", "environment", "said"),
    [
        ({}, {"AUTOSPEC_VLLM_STOR": "x"}, "AUTOSPEC_VLLM_STOR: no such setting; known are store, policy"),
        ({"autospec": {"trace": 2}}, {}, r"additional_config\['autospec'\]\['trace'\]=2: a number from 0 to 1"),
        ({"autospec": []}, {}, "an object is needed"),
        ({"autospec": {"store": 5}}, {}, "a text is needed"),
        ({"autospec": {"drafts": 5}}, {}, "names are needed, as in ngram,suffix"),
        ({}, {"AUTOSPEC_VLLM_CONTROL_SHARE": "often"}, "a number from 0 to 1 is needed"),
        ({}, {"AUTOSPEC_VLLM_RESUME": "perhaps"}, "true or false is needed"),
        ({}, {"AUTOSPEC_VLLM_POLICY": ""}, "AUTOSPEC_VLLM_POLICY is empty"),
    ],
)
def test_what_cannot_be_is_refused(given: object, environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read_settings(given, environment)
