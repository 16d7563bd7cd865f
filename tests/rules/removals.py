"""For every row of docs/security.md, how its rules are taken away, and the test that must fail then.

A removal is a change of the source: exact text, which must stand there once, and what stands there without the rule.
`tests/pure/test_security.py` checks that the list fits the sources and the page; `__main__` does the removing.
"""

from __future__ import annotations

from dataclasses import dataclass

PURE, CPU, E2E = "tests/pure/test_", "tests/cpu/test_", "tests/e2e/test_"


@dataclass(frozen=True, slots=True)
class Edit:
    file: str
    text: str
    without: str


@dataclass(frozen=True, slots=True)
class Removal:
    threat: str  # the row's first cell
    rule: str  # what is gone
    test: str  # as pytest names it
    edits: tuple[Edit, ...]


def _one(threat: str, rule: str, test: str, file: str, text: str, without: str) -> Removal:
    return Removal(threat, rule, test, (Edit(file, text, without),))


WIRE, SANDBOX, GATE = "quire/engine/wire.py", "quire/text/sandbox.py", "quire/server/gate.py"
GGUF, SAFETENSORS = "quire/files/gguf.py", "quire/files/safetensors.py"
TEMPLATE_TEST = f"{PURE}security.py::test_a_template_reaches_nothing_and_builds_nothing_huge"
NO_MEDIA = f"{E2E}security.py::test_no_media_is_fetched_and_no_template_is_taken"
BAD_BODIES = f"{E2E}bad_input.py::test_bad_bodies"
FUZZED = f"{PURE}fuzz.py::test_random_input_is_taken_or_refused"
FRAMES = f"{PURE}wire_messages.py::test_a_frame_counts_once_and_a_missing_or_damaged_one_is_noticed"
ONE_BAD = f"{CPU}engine_faults.py::test_one_bad_request_ends_alone"
LINE, HOSTS = "quire/server/connection.py", "quire/server/host_names.py"
GATES = f"{PURE}gate.py::test"
CONNECTION = f"{PURE}server_connection.py::test_a_head"
BODIES = f"{PURE}server_bodies.py::test"
TEXTWORK = f"{PURE}server_textwork.py::test"
SCHEMAS = "quire/server/schemas.py"
ENDS_EARLY = f"{BODIES}_validation_ends_at_the_first_errors"
ROUTES = f"{E2E}security.py::test_every_route_but_the_probes_and_the_page_wants_a_key"

REMOVALS: tuple[Removal, ...] = (
    # -- unsafe deserialization
    _one("unsafe deserialization", "no pickle",
         f"{PURE}security.py::test_nothing_is_deserialized_or_run_that_can_hold_code",
         WIRE, "import struct\nimport zlib\n", "import pickle\nimport struct\nimport zlib\n"),
    _one("unsafe deserialization", "no torch.load",
         f"{PURE}security.py::test_nothing_is_deserialized_or_run_that_can_hold_code",
         "quire/models/loader.py", "def load_model(", "def load_pickled(path):\n    return torch.load(path)\n\n\n"
         "def load_model("),
    _one("unsafe deserialization", "messages are typed",
         f"{PURE}wire_messages.py::test_what_is_no_message_is_refused",
         WIRE, "= msgspec.msgpack.Decoder(ToEngine)", "= msgspec.msgpack.Decoder()"),
    _one("unsafe deserialization", "frames are checksummed", FRAMES,
         WIRE, "if zlib.crc32(payload, number) != checksum:", "if False:"),
    _one("unsafe deserialization", "frames are numbered", FRAMES,
         WIRE, "if number != expected:", "if False:"),
    # -- template injection
    _one("template injection", "no template from a request", NO_MEDIA,
         "quire/server/schemas.py", 'extra="forbid"', 'extra="ignore"'),
    _one("template injection", "a fixed list of variables", NO_MEDIA,
         "quire/server/conversation.py", "unknown = sorted(set(conversation.template_kwargs) - TEMPLATE_KWARGS)",
         "unknown: list[str] = []"),
    _one("template injection", "messages are data", NO_MEDIA,
         "quire/server/textwork/prompt_maker.py", "            self.template,\n            self.tokenizer,",
         "            ChatTemplate(conversation.messages[-1]['content'], {}),\n            self.tokenizer,"),
    _one("template injection", "an immutable sandbox", TEMPLATE_TEST,
         SANDBOX, "class _Sandbox(ImmutableSandboxedEnvironment):",
         "from jinja2.sandbox import SandboxedEnvironment\n\n\nclass _Sandbox(SandboxedEnvironment):"),
    _one("template injection", "Python's insides are hidden", TEMPLATE_TEST,
         SANDBOX, '    intercepted_binops = frozenset(["*", "**", "+", "%"])\n',
         '    intercepted_binops = frozenset(["*", "**", "+", "%"])\n\n'
         "    def is_safe_attribute(self, obj, attr, value):\n        return True\n"),
    # -- template cost
    _one("template cost", "turns are counted", f"{PURE}security.py::test_a_template_ends_in_time",
         SANDBOX, "    _count_turns(tree)\n", ""),
    _one("template cost", "three seconds", f"{PURE}security.py::test_a_template_ends_in_time",
         SANDBOX, "if not self._turns & 255 and self._clock() > self._until:", "if False:"),
    _one("template cost", "products are bounded", TEMPLATE_TEST,
         SANDBOX, "count * len(repeated) > MAX_REPEATED", "count < 0"),
    _one("template cost", "powers are bounded", TEMPLATE_TEST,
         SANDBOX, "left.bit_length() * max(right, 0) > MAX_INT_BITS", "right < 0"),
    _one("template cost", "sums are bounded", TEMPLATE_TEST,
         SANDBOX, "len(left) + len(right) > MAX_TEXT", "len(left) < 0"),
    _one("template cost", "padding is bounded", TEMPLATE_TEST,
         SANDBOX, "if name in _PADDED and any(", "if False and any("),
    _one("template cost", "padding filters are bounded", TEMPLATE_TEST,
         SANDBOX, "if any(isinstance(arg, int) and arg > MAX_WIDTH for arg in (*args, *kwargs.values())):",
         "if False:"),
    _one("template cost", "formats are bounded", TEMPLATE_TEST,
         SANDBOX, "if isinstance(left, str) and _WIDTH.search(left):", "if False:"),
    _one("template cost", "format methods are bounded", TEMPLATE_TEST,
         SANDBOX, 'if name in ("format", "format_map") and _WIDTH.search(owner):', "if False:"),
    _one("template cost", "the prompt is bounded", TEMPLATE_TEST,
         "quire/text/template.py", "if num_chars > self._max_chars:", "if False:"),
    _one("text that is no text", "depth is bounded",
         f"{BODIES}_responses_refuse_at_creation_what_they_could_not_show",
         "quire/server/bodies.py", '    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:', "    if False:"),
    _one("replies that outgrow their request", "a prompt is scored once",
         f"{BODIES}_a_prompt_is_scored_and_shown_once", "quire/server/openai/completions.py",
         "asked = body.prompt_logprobs is not None and index % n == 0", "asked = body.prompt_logprobs is not None"),
    _one("replies that outgrow their request", "a reply has a bound",
         f"{BODIES}_a_reply_that_would_hold_too_much_is_refused_beforehand",
         "quire/server/generation.py", "if count > MAX_LOGPROBS_SHOWN:", "if False:"),
    _one("replies that outgrow their request", "values in errors are cut",
         f"{BODIES}_a_wrong_value_is_not_repeated_at_length",
         "quire/types/params.py", 'shown = repr(value if not isinstance(value, str) else value[:101])\n'
         '    shown = shown if len(shown) <= 100 else f"{shown[:97]}..."', "shown = repr(value)"),
    _one("numbers beyond the engine's", "logit_bias has a range", f"{BODIES}_numbers_beyond_float32_are_refused",
         "quire/types/params.py", "not -MAX_BIAS <= value <= MAX_BIAS", "value != value"),
    _one("numbers beyond the engine's", "whole numbers have a range",
         f"{BODIES}_whole_numbers_beyond_their_range_are_refused",
         "quire/types/params.py", '    ("top_k", 0, 1 << 31),\n', ""),
    # -- text workers
    _one("text cost", "a task's processor time is bounded", f"{TEXTWORK}_the_kernel_ends_what_computes_too_long",
         "quire/server/textwork/process.py", "processor_seconds(setup, len(payload)))", "0)"),
    _one("text cost", "a worker's memory is bounded", f"{TEXTWORK}_the_kernel_refuses_memory_beyond_a_workers_limit",
         "quire/server/textwork/process.py", "resource.setrlimit(resource.RLIMIT_AS, (memory, memory))", "del memory"),
    _one("text cost", "what kills its worker is not tried again",
         f"{TEXTWORK}_whatever_a_template_does_ends_and_others_go_on",
         "quire/server/textwork/pool.py", "if lost.is_tasks_fault:", "if False:"),
    _one("text cost", "a worker that ends is replaced",
         f"{TEXTWORK}_a_worker_that_is_killed_is_replaced_and_its_task_done",
         "quire/server/textwork/pool.py", "for _ in range(2):", "for _ in range(1):"),
    _one("text cost", "a reply is its own task's", f"{TEXTWORK}_a_task_that_was_given_up_gives_no_other_its_reply",
         "quire/server/textwork/pool.py", "            if not done:  #", "            if False:  #"),
    _one("text cost", "what waits is bounded", f"{TEXTWORK}_too_many_waiting_tasks_are_refused",
         "quire/server/textwork/pool.py", "if self._waiting >= MAX_WAITING or", "if"),
    _one("text cost", "what can't fit is not encoded", f"{TEXTWORK}_refusals_cross_the_processes_as_they_are",
         "quire/text/prompts.py", "    if len(text) > SLICE_CHARS:\n", "    if False:\n"),
    _one("text cost", "bodies hold so many values", f"{TEXTWORK}_refusals_cross_the_processes_as_they_are",
         "quire/server/textwork/tasks.py", "if _num_nodes(value, MAX_NODES) > MAX_NODES:", "if False:"),
    # -- media
    _one("SSRF and media bombs", "parts that are not text are refused", NO_MEDIA,
         "quire/server/openai/translate.py", '            raise bad_request("unsupported_content", message, where)\n',
         '            text = part.type\n'),
    # -- schema and regex cost
    _one("schema and regex cost", "a size limit", BAD_BODIES,
         "quire/server/conversation.py", "if output is not None and len(output.value) > self.max_schema:", "if False:"),
    _one("schema and regex cost", "a deadline",
         f"{PURE}grammar_desk.py::test_errors_deadlines_and_those_who_leave",
         "quire/engine/grammar_desk.py", "elif now > place.until:", "elif False:"),
    _one("schema and regex cost", "at most so many at a time",
         f"{PURE}grammar_rules.py::test_too_many_waiting_are_refused",
         "quire/engine/grammar.py", "if self._num_pending >= self._max_pending:", "if False:"),
    _one("schema and regex cost", "nobody else waits",
         f"{PURE}grammar_desk.py::test_waits_until_it_is_compiled_and_the_next_does_not_wait",
         "quire/engine/grammar_desk.py", "        if grammar.done():\n",
         "        grammar.exception(2)\n        if True:\n"),
    _one("schema and regex cost", "depth is bounded", f"{PURE}schema_normal.py::test_limits_of_a_schema_are_refusals",
         "quire/text/schema/normal.py", "if depth > MAX_DEPTH:", "if False:"),
    _one("schema and regex cost", "patterns are counted",
         f"{PURE}schema_normal.py::test_limits_of_a_schema_are_refusals",
         "quire/text/schema/normal.py", "if len(self._patterns) > MAX_PATTERNS:", "if False:"),
    _one("schema and regex cost", "looks are counted",
         f"{PURE}schema_normal.py::test_what_is_looked_at_has_a_bound",
         "quire/text/schema/refs.py", "return self._work <= MAX_WORK", "return True"),
    _one("headers made of a client's words", "one line of printable ASCII",
         f"{PURE}schema_normal.py::test_notes_are_short_lines_for_a_header",
         "quire/text/schema/found.py", 'if " " <= character <= "~" else "?"', 'if True else "?"'),
    _one("schema and regex cost", "who has no usable grammar does not run without one",
         f"{PURE}server_driver.py::test_requests_wait_for_their_grammars_and_others_do_not",
         "quire/engine/driver.py", "                if error is not None:\n                    raise error\n", ""),
    # -- unbounded fields
    _one("unbounded fields", "lists of a body have a bound", BAD_BODIES,
         SCHEMAS, "Stop = str | Annotated[Items[str], Field(max_length=MAX_STOPS)]", "Stop = str | Items[str]"),
    _one("unbounded fields", "bodies together have a bound", f"{BODIES}_bodies_together_have_a_bound",
         "quire/server/bodies.py", "if self.num_bytes + count > self._limit:", "if False:"),
    _one("unbounded fields", "the body has a bound", f"{E2E}bad_input.py::test_oversized_body",
         GATE, "if size > limit:", "if False:"),
    _one("unbounded fields", "messages between the processes have bounds",
         f"{PURE}wire_messages.py::test_lists_are_bounded",
         WIRE, "class CancelMany(msgspec.Struct, tag=\"cancel\", array_like=True, frozen=True):\n"
         "    ids: Annotated[list[Id], Meta(max_length=MAX_BATCH)]",
         "class CancelMany(msgspec.Struct, tag=\"cancel\", array_like=True, frozen=True):\n    ids: list[Id]"),
    Removal("unbounded fields", "the queue has a bound",
            f"{E2E}operation.py::test_a_full_queue_answers_429_and_idle_streams_get_signs_of_life",
            (Edit("quire/server/generation.py", "excess = len(client.live) + count - self._max_open", "excess = 0"),
             Edit("quire/engine/scheduler.py", "            self._admission.admit(request, len(self.requests), "
                  "self.waiting.num_tokens)\n", "            pass\n"))),
    _one("unbounded fields", "stored responses have a bound",
         f"{PURE}server_store.py::test_large_ones_go_when_they_take_too_much",
         "quire/server/store.py", "while self._num_bytes > self._max_bytes and", "while False and"),
    # -- bodies
    _one("errors that outgrow their body", "lists end at the first wrong item", ENDS_EARLY,
         SCHEMAS, "Field(fail_fast=True, max_length=MAX_PROMPT_TOKENS)", "Field(max_length=MAX_PROMPT_TOKENS)"),
    _one("errors that outgrow their body", "one unknown field is reported", ENDS_EARLY,
         SCHEMAS, "if not isinstance(value, dict) or len(value) <= len(fields):", "if True:"),
    _one("errors that outgrow their body", "one wrong value is reported", ENDS_EARLY,
         SCHEMAS, "return value if wrong is None else {wrong: value[wrong]}", "return value"),
    _one("errors that outgrow their body", "every list ends early",
         f"{BODIES}_every_list_of_a_body_ends_at_its_first_wrong_item_and_has_a_bound",
         SCHEMAS, "Items = Annotated[list[T], Field(fail_fast=True, max_length=MAX_ITEMS)]",
         "Items = Annotated[list[T], Field(max_length=MAX_ITEMS)]"),
    _one("errors that outgrow their body", "keys are cut",
         f"{BODIES}_a_key_of_the_clients_is_not_repeated_at_length",
         "quire/server/errors.py", "else str(part)[:200]  # a key", "else str(part)  # a key"),
    _one("text that is no text", "JSON is read strictly", f"{BODIES}_json_is_read_strictly",
         "quire/server/bodies.py", "value = msgspec.json.decode(body)", "value = json.loads(body)"),
    # -- heads
    _one("heads that do not end", "a head has a time", f"{CONNECTION}_that_does_not_end_in_time_is_cut_off",
         LINE, "self._timer = self.loop.call_later(seconds, self.drop)", "self._timer = None"),
    _one("heads that do not end", "a head has a size", f"{CONNECTION}_without_end_is_refused",
         LINE, "if not self._in_body and self._num_framing > MAX_HEAD:", "if False:"),
    _one("heads that do not end", "a head has so many fields", f"{PURE}server_connection.py::test_fields_are_counted",
         LINE, "if self._num_fields > MAX_FIELDS:", "if False:"),
    # -- connections
    _one("connections that hold memory", "what surrounds a body is bounded",
         f"{PURE}server_connection.py::test_what_surrounds_a_body_has_bounds[one trailer]",
         LINE, "if self._in_body and (self._since_body > MAX_FRAMING or", "if False and (True or"),
    _one("connections that hold memory", "what is no body is counted in every state",
         f"{CONNECTION.removesuffix('head')}connection_holds_little_whatever_is_sent_without_end[field-never]",
         LINE, "if not self._in_body and self._num_framing > MAX_HEAD:", "if False:"),
    _one("connections that hold memory", "a body that was not read ends the connection",
         f"{CONNECTION.removesuffix('head')}reply_to_a_body_that_was_not_read_ends_the_connection",
         LINE, "self._keep_alive_after, self.cycle.keep_alive = self.cycle.keep_alive, False",
         "self._keep_alive_after = self.cycle.keep_alive"),
    _one("connections that hold memory", "few requests come before their turn",
         f"{PURE}server_connection.py::test_few_requests_may_come_before_their_turn",
         LINE, "if len(self._exchanges) > MAX_AHEAD:", "if False:"),
    _one("connections that hold memory", "connections are counted",
         f"{PURE}server_connection.py::test_the_number_of_connections_has_a_bound_and_those_without_a_request_go_first",
         "quire/server/open_connections.py", "if len(self._open) >= self.limit:", "if False:"),
    _one("connections that hold memory", "all connections hold so much together",
         f"{PURE}server_connection.py::test_all_connections_hold_so_much_together",
         "quire/server/open_connections.py", "return change <= 0 or self.num_held <= self.max_held", "return True"),
    _one("bodies that do not end", "a body has a time",
         f"{GATES}_a_body_that_drips_is_cut_off[time]",
         "quire/server/body_pace.py", "latest = min(now + IDLE_SECONDS, started + self.seconds)",
         "latest = now + IDLE_SECONDS"),
    _one("bodies that do not end", "a body has a rate", f"{GATES}_the_pace_of_a_body",
         "quire/server/body_pace.py", " if self.rate else latest", " if False else latest"),
    # -- who calls, and what
    _one("DNS rebinding and websites", "names of this machine only",
         f"{GATES}_a_keyless_loopback_server_answers_to_names_of_this_machine_only",
         HOSTS, "if host is not None and not self._knows(host, local):", "if False:"),
    _one("DNS rebinding and websites", "no websites", f"{GATES}_websites_may_not_call_a_keyless_loopback_server",
         HOSTS, "if match is None or not self._knows(match[1], local):", "if False:"),
    _one("headers that contradict each other", "headers that decide are given once",
         f"{GATES}_headers_that_decide_are_given_once[host]", GATE, "if names.count(name) > 1:", "if False:"),
    _one("headers that contradict each other", "one caller, not two",
         f"{GATES}_a_revoked_key_beside_a_good_one_reads_nothing",
         "quire/server/keys.py", "if bearer and plain is not None and plain != bearer:", "if False:"),
    _one("headers that contradict each other", "trailers add no headers",
         f"{PURE}server_connection.py::test_small_chunks_with_few_trailers_pass_and_trailers_add_no_headers",
         LINE, "if self._in_head:  # trailers are dropped", "if True:  # trailers are dropped"),
    # -- readers that do not read: we give them up, and so does the system
    Removal("readers that do not read", "nobody waits longer than send_timeout",
            f"{E2E}security.py::test_a_reader_who_does_not_read_is_cut_off",
            (Edit("quire/server/replies.py", "async with asyncio.timeout(self.patience):",
                  "async with asyncio.timeout(None):"),
             Edit("quire/server/run.py", 'if hasattr(socket, "TCP_USER_TIMEOUT") and send_timeout:', "if False:"))),
    # -- ids and keys
    _one("id collisions", "ids inside are random", f"{E2E}security.py::test_equal_ids_of_clients_do_not_meet",
         "quire/server/generation.py", "name = f\"{job.request_id or 'gen'}-{secrets.token_hex(4)}\"",
         "name = job.request_id"),
    _one("timing of key checks", "every key is compared",
         f"{PURE}security.py::test_every_key_is_compared_whichever_fits",
         "quire/server/keys.py", "found |= hmac.compare_digest(digest, known)",
         "found = found or hmac.compare_digest(digest, known)"),
    _one("timing of key checks", "keys are hashed first",
         f"{PURE}security.py::test_every_key_is_compared_whichever_fits",
         "quire/server/keys.py", 'return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()',
         'return key.encode("utf-8", "surrogatepass")'),
    _one("prefix-cache timing across tenants", "one key's prompts only",
         f"{E2E}security.py::test_one_tenant_can_not_time_what_another_asked",
         "quire/server/route_parts.py", 'return getattr(request.state, "tenant", b"") + own', "return own"),
    _one("prefix-cache timing across tenants", "cache_salt divides further",
         f"{E2E}security.py::test_one_tenant_can_not_time_what_another_asked",
         "quire/server/route_parts.py", 'return getattr(request.state, "tenant", b"") + own',
         'return getattr(request.state, "tenant", b"")'),
    # -- files of a model
    _one("GGUF and safetensors parsing", "nothing is read past the end",
         f"{PURE}files_gguf.py::test_every_truncation_is_refused",
         GGUF, "if start + num_bytes > min(self.size, MAX_HEADER_BYTES):", "if False:"),
    _one("GGUF and safetensors parsing", "counts are bounded",
         f"{PURE}files_gguf.py::test_lying_array_costs_no_memory",
         GGUF, "if num_items > self.items_left:", "if False:"),
    _one("GGUF and safetensors parsing", "tensors lie within the file", f"{PURE}files_gguf.py::test_lies_are_named",
         GGUF, "if data_start + info.end > self.size:", "if False:"),
    _one("GGUF and safetensors parsing", "a header fits into its file",
         f"{PURE}files_safetensors.py::test_lies_are_named",
         SAFETENSORS, "if 8 + header_len > size:", "if False:"),
    _one("GGUF and safetensors parsing", "tensors do not overlap", f"{PURE}files_safetensors.py::test_lies_are_named",
         SAFETENSORS, "if entry.start < position:", "if False:"),
    _one("GGUF and safetensors parsing", "a header is JSON or refused",
         f"{PURE}files_safetensors.py::test_mutations_pass_or_are_refused",
         SAFETENSORS, "    except (ValueError, RecursionError) as error:\n        _fail(path, f\"its header",
         "    except RecursionError as error:\n        _fail(path, f\"its header"),
    _one("GGUF and safetensors parsing", "text is UTF-8 or refused", f"{FUZZED}[gguf]",
         GGUF, "        except UnicodeDecodeError:\n            self._fail(f\"{what} is not UTF-8 text\")",
         "        except NameError:\n            self._fail(f\"{what} is not UTF-8 text\")"),
    _one("tokenizer files", "what the backend says is one error", f"{FUZZED}[tokenizer]",
         "quire/text/folder_tokenizer.py", "    except Exception as error:  # the backend raises nothing narrower",
         "    except NameError as error:"),
    _one("tokenizer files", "what was found stays mended", f"{PURE}fuzz.py::test_what_was_found_once_stays_mended",
         "quire/text/folder_tokenizer.py", "isinstance(text, str) and _is_text(text):", "isinstance(text, str):"),
    # -- HTTP
    _one("HTTP bodies", "strict schemas", BAD_BODIES, "quire/server/schemas.py", "strict=True", "strict=False"),
    _one("HTTP bodies", "a body that does not fit is an error of ours", f"{FUZZED}[http]",
         "quire/server/app.py", "    @app.exception_handler(RequestValidationError)\n", ""),
    _one("HTTP bodies", "whatever escapes is an error in the caller's dialect",
         f"{PURE}security.py::test_whatever_escapes_is_an_error_in_the_callers_dialect",
         "quire/server/app.py", "    @app.exception_handler(Exception)\n", ""),
    _one("unauthenticated routes", "keys are asked for", ROUTES,
         GATE, "        if server.keys:\n            self._demand(", "        if server.keys:\n            bool("),
    _one("unauthenticated routes", "admin routes have a key of their own", ROUTES,
         GATE, 'self._demand(server.admin_keys.opens(key), key, "admin key")',
         'self._demand(server.admin_keys.opens(key) | server.keys.opens(key), key, "admin key")'),
    _one("unauthenticated routes", "admin routes are closed without one",
         f"{PURE}security.py::test_admin_routes_are_closed_without_a_key",
         GATE, "            if not server.admin_keys:\n                raise",
         "            if not server.admin_keys:\n                return\n                raise"),
    _one("unauthenticated routes", "a wrong key opens nothing", f"{PURE}server_keys.py::test_keys",
         "quire/server/keys.py", "        return found\n", "        return True\n"),
    _one("path traversal", "models are looked up among those served",
         f"{E2E}security.py::test_names_lead_to_no_file",
         "quire/server/state.py", "if name is None or name in self.names:", "if True:"),
    _one("path traversal", "an index names files of its own folder",
         f"{PURE}files_safetensors.py::test_an_index_cannot_lead_elsewhere",
         SAFETENSORS, r' or re.search(r"[/\\:\0]|\.\.", name):', ":"),
    # -- one request, many
    _one("one request that kills the engine", "suspects are halved", ONE_BAD,
         "quire/engine/loop.py", "culprit = self._bisection.failed(touched) if touched else None",
         "culprit = sorted(touched)[0] if touched else None"),
    _one("one request that kills the engine", "twice at one token is quarantined",
         f"{PURE}supervisor.py::test_who_was_aboard_twice_at_one_token_is_quarantined_and_who_moved_on_is_not",
         "quire/engine/client.py", "if live.strikes >= MAX_STRIKES and len(aboard) == 1:", "if False:"),
    _one("one request that kills the engine", "alone in the step",
         f"{PURE}supervisor.py::test_a_request_is_condemned_for_a_step_it_was_alone_in_only",
         "quire/engine/client.py", "if live.strikes >= MAX_STRIKES and len(aboard) == 1:",
         "if live.strikes >= MAX_STRIKES:"),
    _one("one request that kills the engine", "a kill from outside accuses no request",
         f"{PURE}supervisor.py::test_any_number_of_kills_from_outside_accuse_no_request",
         "quire/engine/blame.py", "return not killed or -(exit_code or 0) in OWN_SIGNALS", "return True"),
    _one("one request that kills the engine", "an engine stopped from outside accuses no request",
         f"{PURE}supervisor.py::test_an_engine_that_was_stopped_from_outside_hangs_for_no_request",
         "quire/engine/blame.py", "if code in BLAMELESS or is_stopped:", "if code in BLAMELESS:"),
    _one("one request that kills the engine", "what kills by its own signal is found",
         f"{PURE}supervisor.py::test_a_request_that_kills_the_engine_is_found_whatever_else_does",
         "quire/engine/blame.py", "return not killed or -(exit_code or 0) in OWN_SIGNALS", "return not killed"),
    _one("one request that kills the engine", "who moved on is innocent",
         f"{PURE}supervisor.py::test_who_was_aboard_twice_at_one_token_is_quarantined_and_who_moved_on_is_not",
         "quire/engine/client.py", "live.strikes + 1 if live.struck_at == len(live.delivered) else 1",
         "live.strikes + 1"),
    _one("state that leaks between requests", "spoiled pages are cleared", ONE_BAD,
         "quire/engine/scheduler.py", "        self.cache.scrub(request)\n", ""),
    _one("state that leaks between requests", "pages on the host carry checksums",
         f"{CPU}engine_faults.py::test_a_page_that_changed_on_the_host_is_computed_again",
         "quire/runtime/store.py", "if self._checksums.get((group, copy.source)) != checksum:", "if False:"),
    _one("dependencies with known holes", "CI audits", f"{PURE}security.py::test_ci_audits_the_dependencies",
         ".ci/run", "pip-audit --local", "true --local"),
)  # fmt: skip
