// The charts, made when they come near the screen; one request fetches the curves of several.

import { Chart, color, domain } from './chart.js';
import { button, css, h, later, span } from './dom.js';
import { marksOf } from './events.js';
import { curves } from './server.js';
import { change, state } from './state.js';
import { t } from './words.js';

const PAGE = 12; // charts of a group shown at first
const GROUPS = 30; // groups shown at first
const FIRST_BATCH = 1; // charts in the first request, so that something is seen at once
const BATCH = 10;

const more = (count, onclick) => h('button', { class: 'plain more', onclick }, t('more', { count }));
const viewNow = () => JSON.stringify([state.x, state.smooth, state.zoom, state.diff, state.base]);

export class Grid {
	constructor(infoOf) {
		this.infoOf = infoOf; // run id -> facts of the run
		this.root = h('div', { class: 'groups' });
		this.cards = new Map(); // key -> card
		this.pages = new Map(); // group -> charts shown
		this.groups = GROUPS;
		this.isBusy = false;
		this.seen = new IntersectionObserver((entries) => this.onSeen(entries), { rootMargin: '200px' });
		this.sizes = new ResizeObserver(later(() => this.all((card) => card.chart?.resize()), 80));
		this.sizes.observe(this.root);
	}

	all(work) {
		for (const card of this.cards.values()) work(card);
	}

	// Lay out the charts of the runs that are shown; cards that stay are kept with their data.
	render() {
		const runs = state.runs.filter((id) => this.infoOf(id));
		const groups = arrange(runs.map(this.infoOf), state.q);
		const kept = new Set();
		const sections = groups.slice(0, this.groups).map((group) => this.section(group, runs, kept));
		const rest = groups.length - this.groups;
		if (rest > 0) {
			sections.push(more(Math.min(rest, GROUPS), () => {
				this.groups += GROUPS;
				this.render();
			}));
		}
		for (const [key, card] of this.cards) {
			if (kept.has(key)) continue;
			card.chart?.destroy();
			this.seen.unobserve(card.element);
			this.cards.delete(key);
		}
		this.root.replaceChildren(...sections);
		// It is on the screen: waiting to be told so would take a frame.
		for (const { card } of [...this.root.querySelectorAll('.card')].slice(0, FIRST_BATCH)) this.near(card, true);
		this.first = new Promise((done) => (this.onFirst = done));
		this.pump();
		if (!groups.length && !state.q && runs.length) this.root.append(h('p', { class: 'empty' }, t('noMetrics')));
		else if (!groups.length && state.q) this.root.append(h('p', { class: 'empty' }, t('noMatch', { search: state.q })));
		document.body.classList.toggle('enlarged', Boolean(state.wide && this.cards.has(this.keyOf(state.wide, runs))));
		return groups;
	}

	section(group, runs, kept) {
		const isShut = state.shut.includes(group.key) && !state.q;
		const shown = this.pages.get(group.key) ?? PAGE;
		const title = group.known ? t(group.key) : group.key;
		const fold = h('button', {
			class: 'fold', 'aria-expanded': String(!isShut),
			onclick: () => change({ shut: isShut ? state.shut.filter((key) => key !== group.key) : [...state.shut, group.key] }),
		}, span('arrow'), title, span('many', String(group.charts.length)));
		const cards = isShut ? [] : group.charts.slice(0, shown).map((spec) => this.card(spec, runs, group.key, kept));
		const rest = group.charts.length - shown;
		const grow = () => {
			this.pages.set(group.key, shown + 4 * PAGE);
			this.render();
		};
		return h('section', { class: `group ${['loss', 'channels'].includes(group.key) ? 'first' : cards.length === 1 ? 'lone' : ''}`, data: { group: group.key } }, h('h2', {}, fold), h('div', { class: 'cards' }, cards), !isShut && rest > 0 && more(Math.min(rest, 4 * PAGE), grow));
	}

	keyOf = (chart, runs) => `${runs.join(' ')} ${chart}`;

	card(spec, runs, group, kept) {
		const members = spec.metrics.flatMap(({ name }) => runs.filter((id) => this.infoOf(id).names.includes(name)).map((id) => `${id} ${name}`));
		const key = this.keyOf(spec.key, runs);
		kept.add(key);
		const known = this.cards.get(key);
		if (known && known.members === members.join()) {
			known.element.classList.toggle('wide', state.wide === spec.key);
			return known.element;
		}
		known?.chart?.destroy();
		if (known) this.seen.unobserve(known.element);
		const card = { key, spec, runs, members: members.join(), group, chart: null, isNear: false, need: 'all' };
		card.element = h('article', { class: `card ${state.wide === spec.key ? 'wide' : ''}`, data: { chart: spec.key } },
			h('header', {},
				h('h3', { title: spec.title }, spec.title),
				span('unit', t(spec.unit)),
				span('at'),
				h('span', { class: 'tools' },
					button('image', t('png'), () => card.chart?.plot && card.chart.png(), { data: { tool: 'png' } }),
					button('table', t('csv'), () => card.chart?.csv(), { data: { tool: 'csv' } }),
					button('expand', t('enlarge'), () => change({ wide: state.wide === spec.key ? '' : spec.key }), { data: { tool: 'wide' } }))));
		card.element.card = card;
		this.cards.set(key, card);
		this.seen.observe(card.element);
		return card.element;
	}

	lines({ spec, runs }) {
		const isCompared = runs.length > 1;
		return spec.metrics.flatMap(({ name, label, total, held_out: isHeldOut }, place) =>
			runs.filter((id) => this.infoOf(id).names.includes(name)).map((id) => {
				const line = { run: id, metric: name, label: isCompared ? this.infoOf(id).name : isHeldOut ? t('heldOut', { name: label }) : name === 'loss' ? t('trainLoss') : label, channel: label, place, total, dots: spec.dots || isHeldOut, curve: null, ghost: null };
				return Object.assign(line, { color: this.colorOf(line, runs), hasGhosts: this.infoOf(id).attempt > 1 && !spec.stacked });
			}));
	}

	// A channel has the same colour in every chart, and in the pictures of `z2a plot`.
	colorOf({ run, channel: name, place, total }, runs) {
		if (total) return css('--ink');
		const channel = this.infoOf(run).channels.indexOf(name);
		return color(runs.length > 1 ? state.runs.indexOf(run) : channel < 0 ? place : 1 + (channel % 9));
	}

	onSeen(entries) {
		for (const { target, isIntersecting } of entries) this.near(target.card, isIntersecting);
		this.pump();
	}

	near(card, isNear) {
		card.isNear = isNear;
		if (!isNear || card.chart) return;
		const rank = ['loss', 'channels', 'optim', 'eval'].includes(card.group) ? 9 : 3;
		card.chart = new Chart(card.element, card.spec, this.lines(card), (id) => marksOf(id, rank));
	}

	// ---- fetching ----

	// Everything again: another axis, range, smoothing or baseline.
	refetch() {
		domain.forget();
		this.all((card) => {
			card.need = 'all';
			card.chart?.makeLegend();
		});
		this.pump();
	}

	// Some runs moved on: fetch the ends of their curves.
	moved(ids) {
		this.all((card) => {
			if (!card.need && card.runs.some((id) => ids.has(id))) card.need = 'tail';
		});
		this.pump();
	}

	redraw(isNew) {
		this.all((card) => {
			if (isNew) for (const line of card.chart?.lines ?? []) line.color = this.colorOf(line, card.runs);
			if (card.chart?.plot) card.chart.draw(isNew);
			if (isNew) card.chart?.makeLegend();
			card.chart?.showValues();
		});
	}

	async pump() {
		if (this.isBusy) return;
		this.isBusy = true;
		try {
			for (let limit = FIRST_BATCH; ; limit = BATCH) {
				const due = [...this.root.querySelectorAll('.card')].map((element) => element.card).filter((card) => card.isNear && card.need && card.chart);
				if (!due.length) break;
				due.sort((a, b) => (a.need === 'all' ? 0 : 1) - (b.need === 'all' ? 0 : 1));
				await this.fetch(due[0].need === 'all' ? due.slice(0, limit) : due);
				this.onFirst();
			}
		} catch (error) {
			console.warn(error.message);
			this.all((card) => (card.need &&= 'all'));
			setTimeout(() => this.pump(), 3000);
		} finally {
			this.isBusy = false;
			this.onFirst?.();
		}
	}

	async fetch(cards) {
		const view = viewNow();
		const asked = cards.map((card) => {
			const isNew = card.need === 'all';
			const queries = card.chart.queries(!isNew);
			card.need = '';
			return { card, isNew, queries };
		});
		const flat = asked.flatMap(({ queries }) => queries);
		const answers = flat.length ? await curves(flat.map(({ query }) => query)) : [];
		performance.mark('curves here');
		const isOld = view !== viewNow();
		const before = JSON.stringify(domain.range());
		let place = 0;
		for (const { card, isNew, queries } of asked) {
			const mine = answers.slice(place, (place += queries.length));
			if (isOld) {
				card.need = 'all';
				continue;
			}
			if (card.chart.accept(queries, mine)) card.need = 'all';
			else card.chart.draw(isNew);
			const bad = queries.reduce((sum, { line }) => sum + (line.curve?.nonfinite ?? 0), 0);
			const chip = card.element.querySelector('.badge');
			if (!bad) chip?.remove();
			else if (!chip) card.element.querySelector('.at').before(span('badge', t('notFinite', { count: bad })));
			else chip.textContent = t('notFinite', { count: bad });
		}
		// The common range grew: the others follow.
		if (!state.zoom && before !== JSON.stringify(domain.range())) {
			this.all((card) => card.chart?.plot && !cards.includes(card) && card.chart.draw(false));
		}
	}
}

// Which charts are shown: those of one run as the server arranged them, or of several runs, each metric by itself.

// [{key, known, charts: [{key, title, unit, metrics: [{name, label, total}], stacked, dots, raw}]}]
function arrange(infos, search) {
	const wanted = search.trim().toLowerCase().split(/\s+/).filter(Boolean);
	const isWanted = ({ name }) => wanted.every((word) => name.toLowerCase().includes(word));
	const groups = new Map();
	for (const group of infos.flatMap((info) => info.groups).sort((a, b) => a.rank - b.rank)) {
		const charts = groups.get(group.key)?.charts ?? new Map();
		for (const chart of group.charts) {
			const metrics = chart.metrics.filter(isWanted);
			if (infos.length === 1 && metrics.length > 1) charts.set(chart.key, { ...chart, metrics });
			else for (const { name, held_out } of metrics) charts.set(name, { ...chart, key: name, title: name, metrics: [{ name, label: name, held_out }], stacked: false });
		}
		if (charts.size) groups.set(group.key, { ...group, charts });
	}
	return [...groups.values()].map((group) => ({ ...group, charts: [...group.charts.values()] }));
}
