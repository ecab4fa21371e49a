"use strict";
// Only rows with all words typed above a table are shown.
for (const table of document.querySelectorAll("table:has(thead)")) {
  const box = document.createElement("input");
  box.type = "search";
  box.placeholder = "🔍";
  box.setAttribute("aria-label", table.closest("section").querySelector("h2").textContent);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(" ");
    for (const row of table.tBodies[0].rows) {
      row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    }
  });
  table.parentElement.before(box);
}
