"""Removals of rules on a model's files and on the engine."""

from __future__ import annotations

from tests.rules.removal import CPU, PURE, Removal, drop

GGUF, SAFETENSORS = "quire/files/gguf.py", "quire/files/safetensors.py"
FUZZED = f"{PURE}fuzz.py::test_random_input_is_taken_or_refused"
ONE_BAD = f"{CPU}engine_faults.py::test_one_bad_request_ends_alone"

ENGINE_REMOVALS: tuple[Removal, ...] = (
    # -- files of a model
    drop("GGUF and safetensors parsing", "nothing is read past the end",
         f"{PURE}files_gguf.py::test_every_truncation_is_refused",
         GGUF, "if start + num_bytes > min(self.size, MAX_HEADER_BYTES):", "if False:"),
    drop("GGUF and safetensors parsing", "counts are bounded",
         f"{PURE}files_gguf.py::test_lying_array_costs_no_memory",
         GGUF, "if num_items > self.items_left:", "if False:"),
    drop("GGUF and safetensors parsing", "tensors lie within the file", f"{PURE}files_gguf.py::test_lies_are_named",
         GGUF, "if data_start + info.end > self.size:", "if False:"),
    drop("GGUF and safetensors parsing", "a header fits into its file",
         f"{PURE}files_safetensors.py::test_lies_are_named",
         SAFETENSORS, "if 8 + header_len > size:", "if False:"),
    drop("GGUF and safetensors parsing", "tensors do not overlap", f"{PURE}files_safetensors.py::test_lies_are_named",
         SAFETENSORS, "if entry.start < position:", "if False:"),
    drop("GGUF and safetensors parsing", "a header is JSON or refused",
         f"{PURE}files_safetensors.py::test_mutations_pass_or_are_refused",
         SAFETENSORS, "    except (ValueError, RecursionError) as error:\n        _fail(path, f\"its header",
         "    except RecursionError as error:\n        _fail(path, f\"its header"),
    drop("GGUF and safetensors parsing", "text is UTF-8 or refused", f"{FUZZED}[gguf]",
         GGUF, "        except UnicodeDecodeError:\n            self._fail(f\"{what} is not UTF-8 text\")",
         "        except NameError:\n            self._fail(f\"{what} is not UTF-8 text\")"),
    drop("tokenizer files", "what the backend says is one error", f"{FUZZED}[tokenizer]",
         "quire/text/folder_tokenizer.py", "    except Exception as error:  # the backend raises nothing narrower",
         "    except NameError as error:"),
    drop("tokenizer files", "what was found stays mended", f"{PURE}fuzz.py::test_what_was_found_once_stays_mended",
         "quire/text/folder_tokenizer.py", "isinstance(text, str) and _is_text(text):", "isinstance(text, str):"),
    # -- one request, many
    drop("one request that kills the engine", "suspects are halved", ONE_BAD,
         "quire/engine/loop.py", "culprit = self._bisection.failed(touched) if touched else None",
         "culprit = sorted(touched)[0] if touched else None"),
    drop("one request that kills the engine", "twice at one token is quarantined",
         f"{PURE}supervisor.py::test_who_was_aboard_twice_at_one_token_is_quarantined_and_who_moved_on_is_not",
         "quire/client/engine_client.py", "if live.num_losses >= MAX_LOSSES and len(suspects) == 1:", "if False:"),
    drop("one request that kills the engine", "alone in the step",
         f"{PURE}supervisor.py::test_a_request_is_condemned_for_a_step_it_was_alone_in_only",
         "quire/client/engine_client.py", "if live.num_losses >= MAX_LOSSES and len(suspects) == 1:",
         "if live.num_losses >= MAX_LOSSES:"),
    drop("one request that kills the engine", "a kill from outside accuses no request",
         f"{PURE}supervisor.py::test_any_number_of_kills_from_outside_accuse_no_request",
         "quire/client/blame.py", "return not killed or -(exit_code or 0) in SELF_CAUSED_SIGNALS", "return True"),
    drop("one request that kills the engine", "an engine stopped from outside accuses no request",
         f"{PURE}supervisor.py::test_an_engine_that_was_stopped_from_outside_hangs_for_no_request",
         "quire/client/blame.py", "if code in UNRELATED_CAUSES or is_stopped:", "if code in UNRELATED_CAUSES:"),
    drop("one request that kills the engine", "what kills by its own signal is found",
         f"{PURE}supervisor.py::test_a_request_that_kills_the_engine_is_found_whatever_else_does",
         "quire/client/blame.py", "return not killed or -(exit_code or 0) in SELF_CAUSED_SIGNALS", "return not killed"),
    drop("one request that kills the engine", "who moved on is innocent",
         f"{PURE}supervisor.py::test_who_was_aboard_twice_at_one_token_is_quarantined_and_who_moved_on_is_not",
         "quire/client/engine_client.py", "live.num_losses + 1 if live.loss_len == len(live.delivered) else 1",
         "live.num_losses + 1"),
    drop("state that leaks between requests", "spoiled pages are cleared", ONE_BAD,
         "quire/engine/scheduler.py", "self.cache.scrub(request)", "pass"),
    drop("state that leaks between requests", "pages on the host carry checksums",
         f"{CPU}engine_faults.py::test_a_page_that_changed_on_the_host_is_computed_again",
         "quire/runtime/store.py", "if self._checksums.get((group, copy.source)) != checksum:", "if False:"),
    drop("dependencies with known holes", "CI audits", f"{PURE}security.py::test_ci_audits_the_dependencies",
         ".ci/run", "pip-audit --local", "true --local"),
)  # fmt: skip
