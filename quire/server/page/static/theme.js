// Runs before the first paint, so that a dark page does not flash white. The switch itself is in app.js.
"use strict";
{
  const chosen = localStorage.getItem("quire.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
