// Keeps the page up to date while somebody types or a run goes on. Without this file the button "Show" does the same.
"use strict";
const form = document.getElementById("form");
const result = document.getElementById("result");
const news = document.getElementById("status");
const TYPING_MS = 250;
let pending = null;
let timer = 0;
let address = location.search;
document.body.classList.add("scripted");

function typed() {
  const values = new URLSearchParams();
  for (const [name, value] of new FormData(form)) {
    if (value !== "") values.append(name, value);
  }
  return values;
}

function showErrors(errors) {
  for (const place of form.querySelectorAll(".error")) {
    const name = place.id === "form-error" ? "" : place.id.slice(0, -"-error".length);
    const text = errors[name] || "";
    if (place.textContent !== text) place.textContent = text;
    const control = document.getElementById(name);
    if (control) control.toggleAttribute("aria-invalid", false);
    if (control && text) control.setAttribute("aria-invalid", "true");
  }
}

let shown = null;

function replace(html) {
  // what somebody has opened or reads by keyboard stays where it is
  const open = [...result.querySelectorAll("details")].map((each) => each.open);
  const focused = [...result.querySelectorAll("a, button, summary, [tabindex]")].indexOf(document.activeElement);
  result.innerHTML = shown = html;
  [...result.querySelectorAll("details")].forEach((each, i) => { each.open = open[i] || false; });
  if (focused >= 0) result.querySelectorAll("a, button, summary, [tabindex]")[focused]?.focus({ preventScroll: true });
}

function show(view) {
  showErrors(view.errors);
  // with a message alone the last result stays, dimmed
  const failed = Object.keys(view.errors).length > 0 && view.html === "";
  result.classList.toggle("old", failed && result.innerHTML !== "");
  if (!failed && shown !== view.html) replace(view.html);
  again(view.refresh_s);
}

async function update() {
  if (pending) pending.abort();
  const mine = new AbortController();
  pending = mine;
  result.setAttribute("aria-busy", "true");
  try {
    const answer = await fetch("part?" + typed(), { signal: mine.signal });
    const view = await answer.json();
    if (!answer.ok) throw new Error(view.error.message);
    show(view);
    const bad = Object.values(view.errors);
    news.textContent = bad.length ? bad.join(". ") : "Result updated";
  } catch (error) {
    if (error.name === "AbortError") return;
    showErrors({ "": "The page does not answer (" + error.message + "); is armillary web still running?" });
    again(5);
  }
  if (pending === mine) result.removeAttribute("aria-busy");
}

function again(seconds) {
  clearTimeout(timer);
  if (seconds > 0) timer = setTimeout(refresh, seconds * 1000);
}

async function refresh() {
  // a look at something live: no dimming, and none while the page is hidden
  if (document.hidden) return again(1);
  try {
    const answer = await fetch("part?" + typed());
    if (answer.ok) return show(await answer.json());
  } catch (error) { /* the next look may succeed */ }
  return again(5);
}

form.addEventListener("input", (event) => {
  history.replaceState(null, "", address = "?" + typed());
  clearTimeout(timer);
  if (event.target.tagName === "SELECT" && event.target.name === "for") {
    location.search = "?" + typed();
    return;
  }
  timer = setTimeout(update, TYPING_MS);
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  history.pushState(null, "", address = "?" + typed());
  update();
});
// a link within the page changes only the part after #
window.addEventListener("popstate", () => { if (location.search !== address) location.reload(); });
if ("load" in result.dataset) update();
else again(Number(result.dataset.refresh || 0));
