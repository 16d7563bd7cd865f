"""Removals of the agent's rules: its sandbox, approvals, MCP servers, a project's files, terminals."""

from __future__ import annotations

from tests.rules.removal import E2E, PURE, Edit, Removal, drop

ESCAPE = f"{E2E}agent_sandbox.py::test_an_escape_fails_and_its_rule_is_why"
SANDBOX = f"{E2E}agent_sandbox.py::test"
LOOP, SETTINGS = f"{PURE}agent_loop.py::test", f"{PURE}agent_settings.py::test"
CHOICE = f"{PURE}agent_sandbox_choice.py::test"
LISTED = f"{E2E}agent_mcp.py::test_a_server_is_listed_and_called"
PLAN, LAUNCH = "quire/agent/sandbox/plan.py", "quire/agent/sandbox/child/launch.py"
SUPERVISE, PERMISSIONS = "quire/agent/sandbox/child/supervise.py", "quire/agent/permissions.py"
MCP, OUTPUT, PROMPT = "quire/agent/mcp/tools.py", "quire/agent/sandbox/output.py", "quire/agent/loop/prompt.py"
CALLS, INSIDE, AROUND = "calls of the agent's model", "what the agent's tools reach", "a sandbox with gaps"
SERVERS, FILES, TERMINAL = "MCP servers", "a project's files as instructions", "terminal escape sequences"

AGENT_REMOVALS: tuple[Removal, ...] = (
    # -- approvals
    drop(
        CALLS,
        "a no is a no",
        f"{LOOP}_what_was_not_approved_does_not_run_and_the_model_learns_why",
        PERMISSIONS,
        "if decision is Decision.NO:",
        "if False:",
    ),
    drop(
        CALLS,
        "nobody to ask means no",
        f"{LOOP}_nobody_to_ask_means_no",
        PERMISSIONS,
        'return Approval(False, f"The call was not allowed',
        'return Approval(True, f"The call was not',
    ),
    drop(
        CALLS,
        "--yes covers the sandbox only",
        f"{LOOP}_yes_covers_the_sandbox_only",
        PERMISSIONS,
        "(self.yes and tool.risk is not Risk.OUTSIDE)",
        "self.yes",
    ),
    drop(
        CALLS,
        "a rule for a command allows no second command",
        f"{LOOP}_rules_of_the_allow_list",
        PERMISSIONS,
        " and not set(line[len(head) :]) & _SHELL_SYNTAX",
        "",
    ),
    drop(
        CALLS,
        "a hook that fails blocks",
        f"{LOOP}_a_hook_that_fails_blocks",
        "quire/agent/hooks.py",
        """return f"the hook {hook.run[0]} can't be run: {error.strerror}\"""",
        'return ""',
    ),
    # -- the sandbox
    drop(
        INSIDE,
        "only listed paths are readable",
        f"{ESCAPE}[landlock: read a key of ~/.ssh]",
        SUPERVISE,
        "if rules is not None:",
        "if False:",
    ),
    drop(
        INSIDE,
        "system calls are filtered",
        f"{ESCAPE}[namespaces: make a program setuid]",
        SUPERVISE,
        'if plan["seccomp"]:',
        "if False:",
    ),
    drop(
        INSIDE,
        "without a network of its own there are no sockets",
        f"{ESCAPE}[landlock: send by UDP]",
        PLAN,
        'SECCOMP_RULES if "net" in namespaces else (*SECCOMP_RULES, "all sockets")',
        "SECCOMP_RULES",
    ),
    Removal(
        INSIDE,
        "the network is the sandbox's own",
        f"{ESCAPE}[namespaces: send by UDP]",
        (
            Edit(
                LAUNCH,
                'syscalls.unshare(plan["namespaces"])',
                'syscalls.unshare([name for name in plan["namespaces"] if name != "net"])',
            ),
            Edit(LAUNCH, 'if "net" in plan["namespaces"]:', "if False:"),
        ),
    ),
    drop(
        INSIDE,
        "what other programs run is read-only",
        f"{ESCAPE}[namespaces: plant a hook in .git]",
        PLAN,
        'PROTECTED = (".git", ".hg", ".mcp.json", ".quire")',
        "PROTECTED = ()",
    ),
    drop(
        INSIDE,
        "files have a largest size",
        f"{ESCAPE}[landlock: write a huge file]",
        SUPERVISE,
        '    "file_bytes": resource.RLIMIT_FSIZE,\n',
        "",
    ),
    drop(
        INSIDE,
        "no secret is in the environment",
        f"{SANDBOX}_the_environment_has_no_secrets_and_a_visible_path",
        PLAN,
        "passed = {name: given[name] for name in PASSED_VARIABLES if name in given}",
        "passed = dict(given)",
    ),
    drop(
        INSIDE,
        "a background process ends with its call",
        f"{SANDBOX}_what_runs_in_the_background_ends_with_the_call[landlock]",
        PLAN,
        "end_background: bool = True",
        "end_background: bool = False",
    ),
    drop(
        INSIDE,
        "no mount follows a link",
        f"{SANDBOX}_a_link_in_the_way_of_a_mount_is_refused",
        "quire/agent/sandbox/child/mounts.py",
        "if os.path.islink(at):",
        "if False:",
    ),
    drop(
        INSIDE,
        "the home folder is no project",
        f"{SANDBOX}_a_folder_that_holds_more_than_a_project_is_refused",
        PLAN,
        "if is_system or real == home or real in home.parents:",
        "if False:",
    ),
    # -- what the kernel lacks
    drop(
        AROUND,
        "a step that fails runs nothing",
        f"{SANDBOX}_a_step_that_fails_runs_nothing",
        SUPERVISE,
        '_report_failure(status, "sandbox", str(error))',
        "pass",
    ),
    drop(
        AROUND,
        "Landlock is not passed over",
        f"{CHOICE}_landlock_is_not_passed_over_where_the_kernel_has_none",
        "quire/agent/sandbox/child/landlock.py",
        '    if abi == 0:\n        raise OSError(38, "landlock: the kernel has none")\n',
        "    if abi == 0:\n        return\n",
    ),
    drop(
        AROUND,
        "gaps are said",
        f"{CHOICE}_gaps_of_an_older_landlock_are_said",
        "quire/agent/sandbox/choose.py",
        "for since, gap in _OLD_LANDLOCK_GAPS if abi < since",
        "for gap in ()",
    ),
    drop(
        AROUND,
        "--yes needs the whole sandbox",
        f"{E2E}agent_once.py::test_yes_needs_the_whole_sandbox",
        "quire/agent/assemble.py",
        "if options.yes and not sandbox.is_whole:",
        "if False:",
    ),
    # -- MCP servers
    drop(SERVERS, "their calls are outside the sandbox", LISTED, MCP, "risk = Risk.OUTSIDE", "risk = Risk.READ"),
    drop(
        SERVERS,
        "their text is cleaned",
        LISTED,
        MCP,
        "parts.append(clean_text(block.text))",
        "parts.append(block.text)",
    ),
    # -- a project's files
    drop(
        FILES,
        "a project starts no servers",
        f"{SETTINGS}_a_projects_servers_are_not_started_by_themselves",
        "quire/agent/settings.py",
        "if own.is_file() else ()), *files):",
        "if own.is_file() else ()), *files, *((project / PROJECT_FILE,) if project else ())):",
    ),
    drop(
        FILES,
        "AGENTS.md is bounded",
        f"{SETTINGS}_agents_md_is_bounded_and_no_link_leads_out_of_the_project",
        PROMPT,
        "if len(text) > MAX_AGENTS:",
        "if False:",
    ),
    drop(
        FILES,
        "AGENTS.md is no link out",
        f"{SETTINGS}_agents_md_is_bounded_and_no_link_leads_out_of_the_project",
        PROMPT,
        "if not path.resolve().is_relative_to(folder.resolve()):",
        "if False:",
    ),
    drop(
        FILES,
        "attached files are the project's",
        f"{SETTINGS}_a_file_outside_of_the_project_is_not_attached",
        PROMPT,
        "if not path.is_relative_to(folder.resolve()):",
        "if False:",
    ),
    # -- terminals
    drop(
        TERMINAL,
        "sequences of a tool go",
        f"{SANDBOX}_escape_sequences_do_not_reach_a_terminal[landlock]",
        OUTPUT,
        'text = _SEQUENCES.sub("", text)',
        "pass",
    ),
    drop(
        TERMINAL,
        "other control characters go",
        f"{SANDBOX}_escape_sequences_do_not_reach_a_terminal[landlock]",
        OUTPUT,
        "return text.translate(_CONTROLS).translate(_DIRECTIONS)",
        "return text",
    ),
    drop(
        TERMINAL,
        "a model's answer is made printable",
        f"{PURE}agent_repl.py::test_escape_sequences_of_a_model_do_not_reach_the_terminal",
        "quire/cli/agent_chat/repl/screen.py",
        'self._answer.feed(printable(item["delta"]))',
        'self._answer.feed(item["delta"])',
    ),
)
