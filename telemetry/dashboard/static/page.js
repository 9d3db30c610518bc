"use strict";
// Definitions on hover and focus, times in the reader's zone, and updates that leave the reader where they are.

const POLL_MS = 5000;
const FOCUSABLE = "a[href], button, input, select, summary, [tabindex]";

const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);

function showTip(term) {
  tip.textContent = term.dataset.definition;
  tip.hidden = false;
  const place = term.getBoundingClientRect();
  const left = Math.min(place.left, window.innerWidth - tip.offsetWidth - 8);
  const below = place.bottom + 6;
  const top = below + tip.offsetHeight > window.innerHeight ? place.top - tip.offsetHeight - 6 : below;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, top)}px`;
  term.setAttribute("aria-describedby", "tip");
}

function hideTip() {
  tip.hidden = true;
  for (const term of document.querySelectorAll("[aria-describedby=tip]")) term.removeAttribute("aria-describedby");
}

function termOf(event) {
  return event.target instanceof Element ? event.target.closest("[data-definition]") : null;
}

for (const kind of ["pointerover", "focusin"]) {
  document.addEventListener(kind, (event) => {
    const term = termOf(event);
    if (term) showTip(term);
  });
}
for (const kind of ["pointerout", "focusout"]) {
  document.addEventListener(kind, (event) => { if (termOf(event)) hideTip(); });
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
document.addEventListener("scroll", hideTip, { capture: true, passive: true });

const zone = new Intl.DateTimeFormat(undefined, {
  year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", timeZoneName: "short",
});

function dress(root) {
  for (const term of root.querySelectorAll("[data-definition][title]")) term.removeAttribute("title");
  for (const each of root.querySelectorAll("time[datetime]")) each.textContent = zone.format(new Date(each.dateTime));
}

function refill(section, fresh) {
  const places = [...section.querySelectorAll(FOCUSABLE)];
  const focused = places.indexOf(document.activeElement);
  const opened = [...section.querySelectorAll("details[id]")].map((each) => [each.id, each.open]);
  const scrolled = [...section.querySelectorAll(".scroll")].map((each) => [each.scrollLeft, each.scrollTop]);
  const search = section.querySelector("#search");
  const typed = search && search === document.activeElement ? search.value : null;
  dress(fresh);
  section.replaceChildren(...fresh.childNodes);
  for (const [id, isOpen] of opened) document.getElementById(id)?.toggleAttribute("open", isOpen);
  section.querySelectorAll(".scroll").forEach((each, index) => {
    if (scrolled[index]) [each.scrollLeft, each.scrollTop] = scrolled[index];
  });
  if (typed !== null && section.querySelector("#search")) section.querySelector("#search").value = typed;
  if (focused >= 0) section.querySelectorAll(FOCUSABLE)[focused]?.focus({ preventScroll: true });
}

async function refresh() {
  const answer = await fetch(location.href, { headers: { accept: "text/html" }, redirect: "error" });
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const section of document.querySelectorAll("[data-live]")) {
    const other = fresh.getElementById(section.id);
    if (other) refill(section, document.importNode(other, true));
  }
  const charts = fresh.getElementById("charts");
  if (charts && window.autospecCharts) {
    dress(charts);
    window.autospecCharts.update(document.importNode(charts, true));
  }
  document.body.dataset.stamp = fresh.body.dataset.stamp;
}

function follow() {
  const status = document.getElementById("live-status");
  const button = document.getElementById("pause");
  if (!status || !button) return;
  let wanted = document.body.dataset.stamp;
  let last = 0;
  let timer = null;
  let isPaused = false;
  const say = (text) => { if (status.textContent !== text) status.textContent = text; };

  function plan() {
    if (timer !== null || isPaused || wanted === document.body.dataset.stamp) return;
    timer = setTimeout(async () => {
      try {
        if (wanted !== document.body.dataset.stamp) await refresh();
        if (!isPaused) say("live");
      } catch (error) {
        say(`not up to date: ${error.message}`);
      }
      last = Date.now();
      timer = null;
      plan(); // again if it failed, or if the server gave out an older page since a new one takes long to make
    }, Math.max(0, last + POLL_MS - Date.now()));
  }

  const source = new EventSource(`${document.body.dataset.base}/events`);
  source.addEventListener("stamp", (event) => { wanted = event.data; if (!isPaused) say("live"); plan(); });
  source.addEventListener("trouble", (event) => say(event.data));
  source.addEventListener("error", () => say("connection lost, trying again"));
  window.addEventListener("pagehide", () => source.close());
  button.hidden = false;
  button.addEventListener("click", () => {
    isPaused = !isPaused;
    button.setAttribute("aria-pressed", String(isPaused));
    say(isPaused ? "paused" : "live");
    if (isPaused) { clearTimeout(timer); timer = null; }
    plan();
  });
}

dress(document);
follow();
