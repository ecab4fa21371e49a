// Building the page. Everything that comes from a run goes through here as text, never as markup.

export function h(tag, props = {}, ...children) {
	const element = document.createElement(tag);
	if (tag === 'button') element.type = tag;
	for (const [name, value] of Object.entries(props)) {
		if (value === null || value === undefined || value === false) continue;
		if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
		else if (name === 'class') element.className = value;
		else if (name === 'vars') for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
		else if (name === 'data') Object.assign(element.dataset, value);
		else if (name in element && !name.includes('-') && name !== 'list') element[name] = value;
		else element.setAttribute(name, value === true ? '' : value);
	}
	element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
	return element;
}

// What may be wider or higher than its place: the keyboard can reach and move it.
export const scroll = (label, content) => h('div', { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': label }, content);
export const span = (name, ...children) => h('span', { class: name }, ...children);

const PATHS = {
	sun: 'M12 7a5 5 0 1 0 0 10 5 5 0 0 0 0-10zM12 2v2m0 16v2M2 12h2m16 0h2M5 5l1 1m12 12 1 1M5 19l1-1M18 6l1-1',
	moon: 'M20 14.5A8.5 8.5 0 1 1 9.5 4 7 7 0 0 0 20 14.5z',
	help: 'M9.2 9a3 3 0 1 1 4.3 2.7c-.9.5-1.5 1.1-1.5 2.3m0 3.2v.1',
	expand: 'M14 4h6v6M20 4l-7 7M10 20H4v-6M4 20l7-7',
	image: 'M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 9.2v.1',
	table: 'M4 5h16v14H4zM4 10h16M10 5v14',
	flag: 'M6 21V4h11l-2 4 2 4H6',
	close: 'M6 6l12 12M18 6 6 18',
	menu: 'M4 7h16M4 12h16M4 17h10',
	chevron: 'M9 6l6 6-6 6',
	left: 'M15 6l-6 6 6 6',
};

export function icon(name) {
	const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
	svg.setAttribute('viewBox', '0 0 24 24');
	svg.setAttribute('aria-hidden', 'true');
	const path = document.createElementNS('http://www.w3.org/2000/svg', 'path');
	path.setAttribute('d', PATHS[name]);
	svg.append(path);
	return svg;
}

export const button = (name, label, onclick, props = {}) =>
	h('button', { class: 'icon', title: label, 'aria-label': label, onclick, ...props }, icon(name));

export const byId = (id) => document.getElementById(id);
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function later(work, milliseconds) {
	let timer = 0;
	return (...args) => {
		clearTimeout(timer);
		timer = setTimeout(() => work(...args), milliseconds);
	};
}

export function announce(text) {
	let live = byId('announce');
	if (!live) document.body.append((live = h('div', { id: 'announce', role: 'status', class: 'toast' })));
	live.textContent = text;
	live.classList.add('shown');
	clearTimeout(live.timer);
	live.timer = setTimeout(() => live.classList.remove('shown'), 2500);
}
