"""What is read from a folder of sentence-transformers, and from folders that somebody has tampered with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.errors import ModelError
from nimble_jobs.sentence import Dense, Pooling, is_folder, read_folder, resolve, transformer_folder
from nimble_jobs.sentence.pooling import MODES

OLD = "sentence_transformers.models."


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Transformer, Pooling, Dense and Normalize, as older versions wrote them."""
    made = tmp_path / "m"
    write(made / "config.json", {"model_type": "bert", "max_position_embeddings": 512})
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    entries = [{"idx": i, "path": path, "type": OLD + kind} for i, (kind, path) in enumerate(kinds.items())]
    write(made / "modules.json", entries)
    write(made / "1_Pooling/config.json", {"pooling_mode_mean_tokens": True})
    dense = {"in_features": 4, "out_features": 2, "activation_function": "torch.nn.modules.activation.Tanh"}
    write(made / "2_Dense/config.json", dense)
    (made / "3_Normalize").mkdir()
    return made


def module(at: int, **entries: Any) -> Callable[[Path], None]:
    """Change an entry of modules.json."""

    def change(folder: Path) -> None:
        held = json.loads((folder / "modules.json").read_text())
        held[at] = {name: value for name, value in {**held[at], **entries}.items() if value is not None}
        write(folder / "modules.json", held)

    return change


def settings(name: str, value: Any) -> Callable[[Path], None]:
    """Replace a file."""
    return lambda folder: write(folder / name, value)


def link(name: str, target: str) -> Callable[[Path], None]:
    """Put a link in the place of a folder."""

    def change(folder: Path) -> None:
        for file in (folder / name).iterdir():
            file.rename(folder.parent / file.name)
        (folder / name).rmdir()
        (folder / name).symlink_to(target)

    return change


def pipe(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


MALFORMED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a path above the folder": (
        module(1, path="../elsewhere"),
        "{m}/modules.json: path '../elsewhere' leaves the model's folder; expected a folder in it",
    ),
    "a path above a folder in it": (
        module(1, path="1_Pooling/../../x"),
        "{m}/modules.json: path '1_Pooling/../../x' leaves the model's folder; expected a folder in it",
    ),
    "an absolute path": (
        module(2, path="/etc"),
        "{m}/modules.json: path '/etc' leaves the model's folder; expected a folder in it",
    ),
    "a path of another system": (
        module(2, path="..\\x"),
        "{m}/modules.json: path '..\\\\x' leaves the model's folder; expected a folder in it",
    ),
    "a link out of the folder": (
        link("1_Pooling", ".."),
        "{m}/modules.json: path '1_Pooling' is a link that leaves the model's folder",
    ),
    "a link in a circle": (link("1_Pooling", "1_Pooling"), "{m}/modules.json: there is no folder {m}/1_Pooling"),
    "a folder that is missing": (module(1, path="none"), "{m}/modules.json: there is no folder {m}/none"),
    "a file for a folder": (module(1, path="config.json"), "{m}/modules.json: {m}/config.json is not a folder"),
    "no JSON": (
        settings("modules.json", "["),
        "{m}/modules.json: not JSON: Expecting value: line 1 column 2 (char 1)",
    ),
    "JSON too deep": (settings("modules.json", "[" * 100_000), "{m}/modules.json: not JSON: maximum recursion depth"),
    "JSON too large": (
        settings("modules.json", "[" + " " * (5 << 20) + "]"),
        "{m}/modules.json: larger than 4 MiB; expected a small JSON file",
    ),
    "no list": (settings("modules.json", {"a": 1}), "{m}/modules.json: found a mapping; expected a list of modules"),
    "an empty list": (settings("modules.json", []), "{m}/modules.json: found a list of 0; expected a list of modules"),
    "an entry that is text": (
        settings("modules.json", ["Transformer"]),
        "{m}/modules.json: module 0 is 'Transformer'; expected a mapping with type and path",
    ),
    "an entry without a type": (module(1, type=None), "{m}/modules.json: module 1: type: found nothing; expected text"),
    "a path that is a number": (module(1, path=3), "{m}/modules.json: module 1: path: found 3; expected text"),
    "no settings of the pooling": (
        lambda m: (m / "1_Pooling/config.json").unlink(),
        "{m}/1_Pooling/config.json: no such file",
    ),
    "a flag that is text": (
        settings("1_Pooling/config.json", {"pooling_mode_mean_tokens": "yes"}),
        "{m}/1_Pooling/config.json: pooling_mode_mean_tokens: found 'yes'; expected true or false",
    ),
    "no way to pool": (
        settings("1_Pooling/config.json", {"pooling_mode": None}),
        "{m}/1_Pooling/config.json: pooling_mode: found None; expected one of cls, max, mean",
    ),
    "sizes that are no sizes": (
        settings("2_Dense/config.json", {"in_features": 0, "out_features": 2}),
        "{m}/2_Dense/config.json: in_features: found 0; expected a whole number from 1 to 1048576",
    ),
    "a size that is text": (
        settings("2_Dense/config.json", {"in_features": "4", "out_features": 2}),
        "{m}/2_Dense/config.json: in_features: found '4'; expected a whole number",
    ),
    "a length that is text": (
        settings("sentence_bert_config.json", {"max_seq_length": "128"}),
        "{m}/sentence_bert_config.json: max_seq_length: found '128'; expected a whole number",
    ),
    "a length of nothing": (
        settings("sentence_bert_config.json", {"max_seq_length": 0}),
        "{m}/sentence_bert_config.json: max_seq_length: found 0; expected at least 1",
    ),
    "settings that are a list": (
        settings("sentence_bert_config.json", []),
        "{m}/sentence_bert_config.json: found a list of 0; expected a mapping",
    ),
    "a prompt that is a number": (
        settings("config_sentence_transformers.json", {"prompts": {"query": 1}}),
        "{m}/config_sentence_transformers.json: prompts.query: found 1; expected text",
    ),
    "a default prompt that is missing": (
        settings("config_sentence_transformers.json", {"default_prompt_name": "query"}),
        "{m}/config_sentence_transformers.json: default_prompt_name: there is no prompt 'query'; expected one of "
        "prompts",
    ),
    "a pipe in place of a file": (
        pipe("1_Pooling/config.json"),
        "{m}/1_Pooling/config.json: is a named pipe; expected a regular file",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_folders_are_errors_that_name_the_file(name: str, folder: Path) -> None:
    """Nothing outside of the folder is opened, nothing waits, and there is no traceback."""
    change, message = MALFORMED[name]
    change(folder)
    with pytest.raises(ModelError) as raised:
        read_folder(folder)
    assert str(raised.value).startswith(message.replace("{m}", str(folder)))


STRANGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "CNN": (module(2, type=f"{OLD}CNN"), f"modules.json: module 2 is {OLD}CNN; expected a Transformer, then Pooling"),
    "LSTM": (module(1, type=f"{OLD}LSTM"), f"modules.json: module 1 is {OLD}LSTM; expected"),
    "BoW": (module(0, type=f"{OLD}BoW"), f"modules.json: module 0 is {OLD}BoW; expected"),
    "CLIPModel": (module(0, type=f"{OLD}CLIPModel"), f"modules.json: module 0 is {OLD}CLIPModel; expected"),
    "Router": (
        module(0, type="sentence_transformers.base.modules.router.Router"),
        "modules.json: module 0 is sentence_transformers.base.modules.router.Router; expected",
    ),
    "code of its own": (
        module(1, type="custom_pooling.Pooling"),
        "module 1 is custom_pooling.Pooling, which is Python code in the folder, and nimble-jobs runs none of it; ",
    ),
    "another order": (module(1, type=f"{OLD}Dense"), f"modules.json: module 1 is {OLD}Dense; expected"),
    "no pooling": (
        settings("modules.json", [{"type": f"{OLD}Transformer", "path": ""}]),
        "modules.json: there is no Pooling; expected",
    ),
    "another task": (
        settings("sentence_bert_config.json", {"transformer_task": "fill-mask"}),
        "sentence_bert_config.json: transformer_task is 'fill-mask'; expected feature-extraction",
    ),
    "another output": (
        settings("sentence_bert_config.json", {"modality_config": {"text": {"method_output_name": "pooler_output"}}}),
        "sentence_bert_config.json: modality_config.text gives 'pooler_output'; expected last_hidden_state",
    ),
    "embeddings that are cut": (
        settings("config_sentence_transformers.json", {"truncate_dim": 8}),
        "config_sentence_transformers.json: truncate_dim is 8; expected null, as embeddings keep all their features",
    ),
    "another kind of model": (
        settings("config_sentence_transformers.json", {"model_type": "SparseEncoder"}),
        "config_sentence_transformers.json: model_type is 'SparseEncoder'; expected SentenceTransformer",
    ),
    "an unknown way to pool": (
        settings("1_Pooling/config.json", {"pooling_mode": ["mean", "median"]}),
        "1_Pooling/config.json: pooling_mode is 'median'; expected one of cls, max, mean",
    ),
    "an unknown flag of the pooling": (
        settings("1_Pooling/config.json", {"word_embedding_dimension": 4, "pooling_mode_new_tokens": True}),
        "1_Pooling/config.json: 'pooling_mode_new_tokens' is not understood; expected any of pooling_mode, "
        "pooling_mode_cls_token, pooling_mode_max_tokens, pooling_mode_mean_tokens, ",
    ),
    "an activation that is code": (
        settings("2_Dense/config.json", {"in_features": 4, "out_features": 2, "activation_function": "os.system"}),
        "2_Dense/config.json: activation_function is 'os.system'; expected one of torch.nn: Identity, Tanh",
    ),
    "a layer over tokens": (
        settings("2_Dense/config.json", {"in_features": 4, "out_features": 2, "module_input_name": "token_embeddings"}),
        "2_Dense/config.json: module_input_name is 'token_embeddings'; expected sentence_embedding",
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_not_understood_is_named(name: str, folder: Path) -> None:
    """The rest of the folder can be read; only its embedding is refused, also if the spec says how to pool."""
    change, message = STRANGE[name]
    change(folder)
    found = read_folder(folder)
    assert found is not None
    assert found.pooling is None
    assert message in found.problems[0]
    for mode in (None, "cls"):
        with pytest.raises(ModelError, match=r"output\.fields: no embedding: ") as raised:
            resolve(folder, mode, None)
        assert message in str(raised.value)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": False},
        {"pooling_mode_cls_token": None},
        {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode": "max", "pooling_mode_mean_tokens": True},
        {"pooling_mode": None},
        {"pooling_mode": "median"},
        {"pooling_mode_new_tokens": True},
        {"pooling_mode_new_tokens": False, "pooling_mode_mean_tokens": True},
        {"pooling_mode": "cls", "pooling_mode_new_tokens": True},
        {"pooling_mode": "cls", "weights": [1, 2]},
    ],
    ids=str,
)
def test_settings_of_a_pooling_mean_what_they_mean_to_sentence_transformers(said: dict[str, Any], folder: Path) -> None:
    """It refuses what it does not know, whatever else the file says. The mean is taken only where it takes the mean."""
    package = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    write(folder / "1_Pooling/config.json", {"word_embedding_dimension": 4, **said})
    try:
        mode = package.Pooling.load(str(folder / "1_Pooling"), local_files_only=True).pooling_mode
    except (TypeError, ValueError):
        with pytest.raises(ModelError, match=r"1_Pooling/config\.json: .*; expected"):
            resolve(folder, None, None)
    else:
        modes = (mode,) if isinstance(mode, str) else mode
        assert resolve(folder, None, None).modes == tuple(MODES[one] for one in modes)


def test_normalisation_before_a_layer_is_not_understood(folder: Path) -> None:
    """Its place matters there."""
    module(2, type=f"{OLD}Normalize", path="3_Normalize")(folder)
    module(3, type=f"{OLD}Dense", path="2_Dense")(folder)
    found = read_folder(folder)
    assert found is not None
    assert "Normalize stands before Dense" in found.problems[0]


def test_the_spec_wins_over_the_folder(folder: Path, tmp_path: Path) -> None:
    """Pooling and normalisation; the layers stay. Without a folder of that kind the spec must say how to pool."""
    dense = Dense(folder="2_Dense", in_features=4, out_features=2, bias=True, activation="Tanh")
    assert resolve(folder, None, None) == Pooling(modes=("mean",), layers=(dense,), normalize=True)
    assert resolve(folder, "last", False) == Pooling(modes=("last",), layers=(dense,))
    assert resolve(tmp_path, "max", True) == Pooling(modes=("max",), normalize=True)
    assert resolve(None, "max", None) == Pooling(modes=("max",))
    with pytest.raises(ModelError, match=r"output\.pooling: missing, and the model has no modules\.json"):
        resolve(tmp_path, None, True)
    assert read_folder(tmp_path) is None
    assert not is_folder(tmp_path)


def test_words_say_all_of_a_pooling(folder: Path) -> None:
    """They can be read back; text that is none is an error."""
    pooling = resolve(folder, None, None)
    assert Pooling.of_words(pooling.words) == pooling
    for text in ("", "[]", "{}", '{"layers":[{}],"modes":[],"normalize":true}'):
        with pytest.raises(ValueError, match=r"."):
            Pooling.of_words(text)


def test_lengths_come_from_the_tokenizer_if_the_folder_does_not_say(folder: Path) -> None:
    """Never more than the model has positions for; tokenizers without a limit say a number of thirty digits."""
    found = [read_folder(folder)]
    write(folder / "tokenizer_config.json", {"model_max_length": 10**30})
    found.append(read_folder(folder))
    write(folder / "tokenizer_config.json", {"model_max_length": 128})
    found.append(read_folder(folder))
    write(folder / "sentence_roberta_config.json", {"max_seq_length": 75})
    found.append(read_folder(folder))
    assert [one.max_length if one else None for one in found] == [512, 512, 128, 75]


def test_files_may_be_links_as_in_a_cache(folder: Path, tmp_path: Path) -> None:
    """Caches of models keep files apart and link to them."""
    for name in ("modules.json", "1_Pooling/config.json"):
        (folder / name).rename(tmp_path / "blob")
        (tmp_path / "blob").rename(tmp_path / name.replace("/", "-"))
        (folder / name).symlink_to(tmp_path / name.replace("/", "-"))
    assert resolve(folder, None, None).modes == ("mean",)
    assert transformer_folder(folder) == folder


def test_reading_a_folder_needs_no_torch() -> None:
    """Specs are checked with it."""
    code = "import sys, nimble_jobs.sentence; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_that_may_not_be_searched(tmp_path: Path) -> None:
    """It is taken for one of transformers, whose files are then missed by name."""
    closed = tmp_path / "closed"
    (closed / "model").mkdir(parents=True)
    (closed / "model" / "modules.json").write_text("[]")
    user = os.geteuid()
    closed.chmod(0)
    try:
        if user == 0:  # the superuser may search everything
            os.seteuid(65_534)
        assert not is_folder(closed / "model")
        assert transformer_folder(closed / "model") == closed / "model"
    finally:
        os.seteuid(user)
        closed.chmod(0o700)
