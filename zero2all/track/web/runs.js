// The list of runs on the left.

import { color } from './chart.js';
import { button, byId, h, later, span } from './dom.js';
import { age, count, number } from './format.js';
import { get } from './server.js';
import { change, state } from './state.js';
import { t } from './words.js';

export class RunList {
	constructor() {
		Object.assign(this, { rows: new Map(), roots: [], total: 0, search: '', version: 0 });
	}

	async load() {
		const found = await get('runs', { q: this.search });
		this.rows = new Map(found.rows.map((row) => [row.id, row]));
		Object.assign(this, { roots: found.roots, total: found.total, version: found.version, boot: found.boot });
		this.draw();
	}

	// Rows that changed, and ids that are gone, as the stream tells them.
	merge({ rows = [], gone = [], roots }) {
		for (const row of rows) {
			if (!this.rows.has(row.id)) this.total += 1;
			if (this.rows.has(row.id) || !this.search || row.id.toLowerCase().includes(this.search.toLowerCase())) this.rows.set(row.id, row);
		}
		for (const id of gone) if (this.rows.delete(id)) this.total -= 1;
		if (roots) this.roots = roots;
		this.draw();
	}

	draw() {
		const box = byId('runs');
		if (!this.list) this.frame(box);
		const rows = [...this.rows.values()].sort((a, b) => (b.time ?? 0) - (a.time ?? 0) || a.id.localeCompare(b.id));
		const focused = document.activeElement?.dataset?.focus;
		this.counter.textContent = this.total ? String(this.total) : '';
		this.list.replaceChildren(...rows.map((row) => this.row(row)));
		if (!rows.length) this.list.append(h('li', { class: 'hint' }, this.search ? t('noRunMatch') : t('noRuns')));
		if (this.total > rows.length) this.list.append(h('li', { class: 'hint' }, `${rows.length} / ${this.total}`));
		this.places.replaceChildren(...this.roots.filter((root) => root.remote || root.state !== 'live' || this.roots.length > 1).map(place));
		if (focused) this.list.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
	}

	frame(box) {
		this.counter = span('many');
		this.list = h('ul', { class: 'run-list' });
		this.places = h('ul', { class: 'places' });
		const search = h('input', {
			type: 'search', id: 'run-search', placeholder: t('findRun'), 'aria-label': t('findRun'), autocomplete: 'off', spellcheck: false, value: this.search,
			oninput: later((event) => { this.search = event.target.value; this.load(); }, 150),
		});
		box.replaceChildren(h('h2', {}, t('runs'), this.counter), search, this.list, this.places);
	}

	relabel() {
		this.list = null;
		this.draw();
	}

	row(row) {
		const place = state.runs.indexOf(row.id);
		const isOn = place >= 0;
		const only = (event) => {
			if (event.metaKey || event.ctrlKey || event.shiftKey) toggle();
			else change({ runs: [row.id], base: '', diff: false, zoom: null });
			document.body.classList.remove('runs-open');
		};
		const toggle = () => {
			const runs = isOn ? state.runs.filter((id) => id !== row.id) : [...state.runs, row.id];
			const base = runs.includes(state.base) ? state.base : '';
			change({ runs, base, diff: state.diff && Boolean(base) });
		};
		const step = row.total ? `${count(row.step ?? 0)} / ${count(row.total)}` : row.step === null ? '–' : count(row.step);
		return h('li', { class: `run ${isOn ? 'on' : ''} ${row.state}`, data: { run: row.id } },
			h('button', {
				class: 'pick', role: 'checkbox', 'aria-checked': String(isOn),
				title: t(isOn ? 'removeRun' : 'addRun', { name: fullName(row) }), onclick: toggle, data: { focus: `pick ${row.id}` },
				vars: isOn ? { '--own': color(place) } : {},
			}),
			h('button', { class: 'only', title: fullName(row), onclick: only, data: { focus: `only ${row.id}` } },
				span('line', span('name', row.name), span('where', row.place), span('when', age(row.time))),
				span('meta', statePill(row.state), span('num', step), span('num', row.loss === null ? '' : number(row.loss)))),
			isOn && state.runs.length > 1 && button('flag', t('makeBaseline'), () => change({ base: state.base === row.id ? '' : row.id, diff: state.base !== row.id }), { 'aria-pressed': String(state.base === row.id), data: { tool: 'base' } }));
	}
}

// With the place, where several have a run of this name.
export const fullName = ({ name, place }) => (place ? `${place}/${name}` : name);
export const statePill = (name) => span(`state ${name}`, t(name));

function place(root) {
	const [word, ...why] = root.state.split(': ');
	const text = word === 'broken' ? t('broken', { why: why.join(': ') }) : t(root.state);
	return h('li', { title: `${root.label}: ${text}` }, h('i', { class: `dot ${word}` }), span('name', root.label), span('what', text));
}
