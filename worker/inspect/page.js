"use strict";
// Search, filters and keys. Everything shown is in the page already; this only hides and marks it.
(() => {
  const all = (selector) => Array.from(document.querySelectorAll(selector));
  const search = document.getElementById("search");
  const show = document.getElementById("show");
  const count = document.getElementById("count");
  const steps = all("article");
  const chips = all(".timeline a");
  let current = -1;

  const shows = {
    all: () => true,
    acted: (step) => step.dataset.kind !== "kept",
    failed: (step) => step.dataset.kind === "failed",
    differs: (step) => step.dataset.differs === "yes",
  };

  function filter() {
    const query = search.value.trim().toLowerCase();
    const found = new Set();
    for (const step of steps) {
      const matches = shows[show.value](step) && step.textContent.toLowerCase().includes(query);
      step.hidden = !matches;
      if (matches) found.add(step.id);
    }
    for (const chip of chips) chip.classList.toggle("dim", !found.has(chip.dataset.step));
    count.textContent = `${found.size} of ${steps.length} steps`;
  }

  function move(by) {
    const seen = steps.filter((step) => !step.hidden);
    if (!seen.length) return;
    const at = seen.findIndex((step) => steps.indexOf(step) === current);
    const next = seen[Math.min(Math.max(at + by, 0), seen.length - 1)];
    current = steps.indexOf(next);
    location.hash = next.id;
  }

  search.addEventListener("input", filter);
  show.addEventListener("change", filter);
  document.addEventListener("keydown", (event) => {
    if (event.target === search || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") { event.preventDefault(); search.focus(); }
    if (event.key === "j") move(1);
    if (event.key === "k") move(-1);
  });
  window.addEventListener("hashchange", () => {
    current = steps.findIndex((step) => step.id === location.hash.slice(1));
  });
  filter();
})();
