const setUpDownloads = () => {
  each("[data-download]", (button) => button.addEventListener("click", async () => {
    const file = payload.downloads[button.dataset.download];
    const packed = new Blob([Uint8Array.from(atob(file.gzip_base64), (letter) => letter.charCodeAt(0))]);
    const text = await new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).text();
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: file.media_type }));
    link.download = button.dataset.download;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }));
  each(".commands", (box) => {
    if (!navigator.clipboard) return;
    const button = box.querySelector(".copy");
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(box.querySelector("code").textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  });
};

const setUpContents = () => {
  const links = new Map([...document.querySelectorAll(".contents a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
    links.forEach((link, id) => (id === entry.target.id ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  }), { rootMargin: "-20% 0px -70%" });
  each(".section", (section) => seen.observe(section));
};

const SET_UP = { pool: setUpPool, placement: setUpPlacement, amdahl: setUpAmdahl };

setUpTheme();
setUpCharts();
setUpDownloads();
setUpContents();
