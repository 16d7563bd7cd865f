// The frame of the page: the current view, the theme, the key, and the server's health.

import { key, onKeyWanted, setKey } from "./api.js";
import { startChat } from "./chat.js";
import { showEngine } from "./engine.js";
import { Feed } from "./feed.js";
import { showRequests } from "./requests.js";

const VIEWS = { chat: "Chat", engine: "Engine", requests: "Requests" };
const byId = (id) => document.getElementById(id);

// -- views ------------------------------------------------------------------------------------------------------------

const feed = new Feed();
const onShow = {
  chat: startChat(),
  engine: showEngine(byId("view-engine"), feed),
  requests: showRequests(byId("view-requests"), feed),
};

function route() {
  const [wanted] = location.hash.slice(1).split("/");
  const name = wanted in VIEWS ? wanted : "chat";
  for (const view of Object.keys(VIEWS)) byId(`view-${view}`).hidden = view !== name;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${VIEWS[name]} · Quire`;
  onShow[name]();
}
addEventListener("hashchange", route);

// -- theme ------------------------------------------------------------------------------------------------------------

const THEMES = { auto: ["◐", "as the system has it"], light: ["○", "light"], dark: ["●", "dark"] };

function showTheme() {
  const chosen = document.documentElement.dataset.theme ?? "auto";
  const [sign, words] = THEMES[chosen];
  byId("theme").textContent = sign;
  byId("theme").setAttribute("aria-label", `Theme: ${words}. Press to change.`);
  byId("theme").title = `Theme: ${words}`;
}

byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const chosen = document.documentElement.dataset.theme ?? "auto";
  const next = names[(names.indexOf(chosen) + 1) % names.length];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  localStorage.setItem("quire.theme", next);
  showTheme();
});

// -- the key ----------------------------------------------------------------------------------------------------------

function askForKey(message) {
  const dialog = byId("key-dialog");
  const field = byId("key-field");
  byId("key-why").textContent = message || "Requests without it are refused.";
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  byId("key").hidden = false;
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const given = dialog.returnValue === "ok" && field.value.trim();
        if (given) setKey(given);
        if (given && feed.state === "locked") feed.restart();
        field.value = "";
        resolve(Boolean(given));
      },
      { once: true },
    );
  });
}
onKeyWanted(askForKey);
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key").hidden = !key();
byId("key").addEventListener("click", async () => {
  if (await askForKey("The key you give now replaces the one in use.")) feed.restart();
});

// -- the server -------------------------------------------------------------------------------------------------------

const WORDS = {
  waiting: "Connecting",
  ok: "Ready",
  busy: "Working",
  problem: "Problem",
  lost: "Not reached",
  locked: "Needs a key",
};

function showState() {
  const status = byId("status");
  status.dataset.state = feed.state;
  status.lastElementChild.textContent = WORDS[feed.state];
  status.title = feed.why;
  byId("model").textContent = feed.hello?.model.names[0] ?? "";
  byId("model").title = feed.hello
    ? `Context of ${feed.hello.model.max_model_len} tokens, ${feed.hello.model.dtype}`
    : "";
}
feed.watch(showState);

showTheme();
showState();
route();
feed.start();
