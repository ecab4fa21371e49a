// One chart: lines (a metric of a run each) with the band between smallest and largest value, markers for what happened,
// and the values under the cursor. While a run is live only the points after the last known one are fetched.

import { css, h, span } from './dom.js';
import { axisValue, number } from './format.js';
import { link } from './server.js';
import { change, state } from './state.js';
import { kindName, t } from './words.js';

const COLORS = 10;
const MAX_TAIL = 600; // points behind the bins before all are fetched again
const MAX_BINS = 1600;
const MARKER_WIDTH = 16;
const HIDDEN = { show: false };
const TIME_STEPS = [1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 604800];
const WHOLE_STEPS = Array.from({ length: 60 }, (_, place) => [1, 2, 5][place % 3] * 10 ** Math.floor(place / 3));

export const color = (place) => css(`--series-${place % COLORS}`);
const withAlpha = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, '0');

// The shared horizontal range of all charts while nothing is zoomed.
export const domain = {
	ends: new Map(),
	set(key, low, high) {
		if (Number.isFinite(low) && Number.isFinite(high)) this.ends.set(key, [low, high]);
	},
	forget() {
		this.ends.clear();
	},
	range() {
		let [low, high] = [Infinity, -Infinity];
		for (const [from, to] of this.ends.values()) [low, high] = [Math.min(low, from), Math.max(high, to)];
		return low <= high ? [low, high] : [0, 1];
	},
};

export class Chart {
	constructor(card, spec, lines, eventsOf) {
		Object.assign(this, { card, spec, lines, eventsOf });
		this.box = h('div', { class: 'plot' });
		this.legend = h('ul', { class: 'legend' });
		this.note = h('p', { class: 'nothing', hidden: true });
		card.append(this.box, this.note, this.legend);
		this.makeLegend();
	}

	// ---- asking ----

	get width() {
		return Math.max(200, Math.round(this.box.clientWidth));
	}

	get isDiff() {
		return state.diff && state.base && this.lines.some((line) => line.run === state.base);
	}

	drawn() {
		return this.isDiff ? this.lines.filter((line) => line.run !== state.base) : this.lines;
	}

	queries(isTail) {
		const common = { axis: state.x, base: this.isDiff ? state.base : undefined };
		const [low, high] = state.zoom ?? [];
		const bins = Math.min(MAX_BINS, Math.round(this.width * Math.min(devicePixelRatio, 1.5)));
		const asked = [];
		for (const line of this.drawn()) {
			const query = { ...common, smooth: this.spec.raw || line.dots ? 'none' : state.smooth, run: line.run, metric: line.metric, low, high, count: bins };
			if (isTail && line.curve) asked.push({ line, query: { ...query, after: line.curve.end, count: 200 } });
			else {
				asked.push({ line, query });
				if (line.hasGhosts && !this.isDiff) {
					asked.push({ line, isGhost: true, query: { ...query, ghosts: true, smooth: 'none', count: 400 } });
				}
			}
		}
		return asked;
	}

	// Takes the answers; true when all curves have to be fetched anew.
	accept(asked, curves) {
		let isStale = false;
		asked.forEach(({ line, query, isGhost }, place) => {
			const curve = curves[place];
			if (isGhost) line.ghost = columns(curve);
			else if (query.after === undefined) {
				line.curve = { ...columns(curve), tail: 0, ...facts(curve) };
			} else if (curve.before !== line.curve.total) isStale = true;
			else if (curve.x.length) {
				const fresh = columns(curve);
				isStale ||= !fresh.smooth !== !line.curve.smooth; // now there are enough points
				this.smoothAgain(line.curve, curve);
				for (const name of ['x', 'low', 'high', 'mean']) line.curve[name].push(...fresh[name]);
				line.curve.smooth?.push(...(fresh.smooth ?? fresh.mean));
				line.curve.bad.push(...fresh.bad);
				line.curve.tail += curve.x.length;
				Object.assign(line.curve, facts(curve));
				isStale ||= line.curve.tail > MAX_TAIL;
			}
			if (!isGhost && line.curve.total) domain.set(`${this.spec.key} ${line.run} ${line.metric}`, line.curve.start, line.curve.end);
		});
		return isStale;
	}

	// New points move the smoothed line before them, too.
	smoothAgain({ x, smooth }, { again_x: places, again }) {
		for (let at = x.length - 1; smooth && places?.length && x[at] >= places[0]; at -= 1) smooth[at] = again[nearest(places, x[at])];
	}

	// ---- drawing ----

	draw(isNew) {
		const lines = this.drawn().filter((line) => line.curve);
		const points = lines.reduce((sum, line) => sum + line.curve.x.length, 0);
		this.note.hidden = points > 0;
		this.note.textContent = points ? '' : this.isDiff ? t('noCommon') : t('noData');
		const data = this.spec.stacked && !this.isDiff ? this.stack(lines) : this.table(lines);
		// A plot has a fixed set of columns; with another set it is another plot.
		const shape = `${data.length} ${lines.map((line) => line.run + line.metric)}`;
		if (this.plot && !isNew && shape === this.shape) this.plot.setData(data);
		else {
			this.shape = shape;
			this.plot?.destroy();
			this.plot = new uPlot(this.options(lines), data, this.box);
		}
		this.showValues();
		this.describe(lines);
		this.card.dataset.points = points;
		this.card.dataset.end = lines.reduce((end, line) => Math.max(end, line.curve.end ?? 0), 0);
	}

	// The chart in words, for those who do not see it.
	describe(lines) {
		const { x: axis } = state;
		const words = lines.filter(({ curve }) => curve.x.length).map(({ label, curve }) => t('inWords', {
			name: label, axis: t(axis), first: number(curve.mean[0]), from: axisValue(axis, curve.x[0]), last: number(curve.last), to: axisValue(axis, curve.end),
			low: number(Math.min(...curve.low.filter(isNumber))), high: number(Math.max(...curve.high.filter(isNumber))),
		}));
		const canvas = this.plot.ctx.canvas;
		canvas.setAttribute('role', 'img');
		canvas.ariaLabel = [`${this.spec.title} ${t(this.spec.unit)}`, ...words, this.note.textContent].filter(Boolean).join('. ');
	}

	// Columns on one common x: per line the edges of the band, the mean, the smoothed line; then the ghosts.
	table(lines) {
		const positive = (values) => (state.ylog ? values.map((value) => (value > 0 ? value : null)) : values);
		const tables = lines.map(({ curve }) => {
			const columns = [curve.high, curve.low, curve.mean, ...(curve.smooth ? [curve.smooth] : [])];
			return [curve.x, ...columns.map(positive)];
		});
		for (const line of lines) if (line.ghost?.x.length) tables.push([line.ghost.x, positive(line.ghost.mean)]);
		if (!tables.length) return [[]];
		return tables.length === 1 ? tables[0] : uPlot.join(tables);
	}

	// The parts on top of each other; their total comes last and stays as it is.
	stack(lines) {
		if (!lines.length) return [[]];
		const joined = uPlot.join(lines.map(({ curve }) => [curve.x, curve.smooth ?? curve.mean]));
		let below = new Array(joined[0].length).fill(0);
		return joined.map((column, place) => {
			if (!place || lines[place - 1].total) return column;
			let last = 0;
			return (below = below.map((sum, at) => sum + (last = column[at] ?? last)));
		});
	}

	options(lines) {
		const ink = css('--ink-2');
		const font = `11px ${css('--font')}`;
		const axis = { stroke: ink, font, grid: { stroke: css('--grid'), width: 1 }, ticks: HIDDEN };
		const series = [{}];
		const bands = [];
		if (this.spec.stacked && !this.isDiff) {
			lines.forEach((line, place) => {
				const fill = withAlpha(line.color, 0.55);
				series.push({ stroke: line.color, width: line.total ? 1.5 : 1, dash: line.total ? [5, 3] : undefined, fill: place || line.total ? undefined : fill, points: HIDDEN });
				if (place && !line.total) bands.push({ series: [place + 1, place], fill });
			});
		} else {
			const alpha = lines.length <= 3 ? 0.2 : lines.length <= 8 ? 0.1 : 0;
			for (const line of lines) {
				const first = series.length;
				const edge = { stroke: alpha ? withAlpha(line.color, alpha) : undefined, width: 0.5, points: HIDDEN };
				series.push(edge, edge);
				if (alpha) bands.push({ series: [first, first + 1], fill: withAlpha(line.color, alpha) });
				const isSmoothed = Boolean(line.curve.smooth);
				series.push({ stroke: withAlpha(line.color, isSmoothed ? 0.35 : 1), width: isSmoothed ? 1 : 1.5, points: isSmoothed ? HIDDEN : { size: 5, ...(line.dots && { show: true }) } });
				if (isSmoothed) series.push({ stroke: line.color, width: 1.75, points: HIDDEN });
			}
			for (const line of lines) {
				if (line.ghost?.x.length) series.push({ stroke: withAlpha(line.color, 0.35), width: 1, dash: [3, 3], points: HIDDEN });
			}
		}
		return {
			width: this.width,
			height: this.box.clientHeight || 220,
			padding: [MARKER_WIDTH, 22, 0, 0],
			legend: HIDDEN,
			cursor: {
				sync: { key: 'z2a', scales: ['x', null], setSeries: false, filters: { pub: isMove, sub: isMove } },
				drag: { x: true, y: false, setScale: false },
				points: HIDDEN,
				bind: { dblclick: () => () => change({ zoom: null }) },
			},
			scales: {
				x: { time: false, distr: state.xlog ? 3 : 1, range: () => this.xRange() },
				y: { distr: state.ylog && !this.isDiff ? 3 : 1, range: (plot, low, high) => this.yRange(plot, low, high) },
			},
			axes: [
				{ ...axis, size: 26, gap: 4, space: 70, incrs: state.x === 'time' ? TIME_STEPS : WHOLE_STEPS, values: (_, at) => at.map((x) => (x === null ? '' : axisValue(state.x, x))) },
				{ ...axis, gap: 4, size: (_, texts) => 16 + 6.4 * Math.max(3, ...(texts ?? []).map((text) => text?.length ?? 0)), values: (_, at) => at.map((y) => (y === null ? '' : number(y).replace(/(\.\d*?)0+(?=$|e)/, '$1').replace(/\.(?=$|e)/, ''))) },
			],
			series,
			bands,
			hooks: {
				setSelect: [(plot) => this.select(plot)],
				setCursor: [() => this.showValues()],
				draw: [(plot) => this.decorate(plot)],
			},
		};
	}

	xRange() {
		let [low, high] = state.zoom ?? domain.range();
		if (state.xlog) return [Math.max(low, high / 1e6, 1e-9), Math.max(high, 1e-8)];
		if (low === high) [low, high] = [low - 1, high + 1];
		return [low, high];
	}

	yRange(plot, low, high) {
		if (low === null || high === null) return [0, 1];
		const isLog = state.ylog && !this.isDiff;
		if (state.robust) [low, high] = this.middle(plot) ?? [low, high];
		if (isLog) return uPlot.rangeLog(low, high, 10, false);
		if (this.spec.stacked) low = Math.min(0, low);
		if (this.isDiff) [low, high] = [Math.min(0, low), Math.max(0, high)];
		const room = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.06;
		return [this.spec.stacked && low >= 0 ? low : low - room, high + room];
	}

	// The range without the most extreme hundredth on either side.
	middle(plot) {
		const { min, max } = plot.scales.x;
		const values = [];
		for (const { curve } of this.drawn().filter((line) => line.curve)) {
			curve.x.forEach((x, place) => x >= min && x <= max && values.push(curve.mean[place]));
		}
		if (values.length < 20) return null;
		values.sort((a, b) => a - b);
		return [values[Math.floor(values.length * 0.01)], values[Math.ceil(values.length * 0.99) - 1]];
	}

	select(plot) {
		const { left, width } = plot.select;
		if (width > 4) change({ zoom: [plot.posToVal(left, 'x'), plot.posToVal(left + width, 'x')] });
		plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
	}

	// Hairlines for what happened, rings around spikes, red ticks where a value was not a number.
	decorate(plot) {
		const { ctx, bbox } = plot;
		const ratio = uPlot.pxRatio;
		const { min, max } = plot.scales.x;
		const isInside = (x) => x >= min && x <= max;
		const shown = [];
		ctx.save();
		ctx.beginPath();
		ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
		ctx.clip();
		if (this.isDiff) {
			ctx.strokeStyle = css('--ink-3');
			line(ctx, bbox.left, plot.valToPos(0, 'y', true), bbox.left + bbox.width, plot.valToPos(0, 'y', true), ratio);
		}
		for (const id of new Set(this.drawn().map((each) => each.run))) {
			for (const event of this.eventsOf(id)) {
				if (!isInside(event.x)) continue;
				shown.push({ ...event, run: id });
				const x = plot.valToPos(event.x, 'x', true);
				ctx.strokeStyle = withAlpha(css(`--${event.tone}`), event.rank > 5 ? 0.18 : 0.5);
				ctx.setLineDash(event.kind === 'segment' || event.kind === 'restart' ? [4 * ratio, 4 * ratio] : []);
				if (event.rank <= 7) line(ctx, x, bbox.top, x, bbox.top + bbox.height, ratio);
				const owner = event.kind === 'spike' && !this.isDiff && this.lines.find((each) => each.run === id && each.metric === event.metric);
				if (owner && !this.spec.stacked && Number.isFinite(event.value)) {
					const y = Math.max(bbox.top + 5 * ratio, plot.valToPos(event.value, 'y', true));
					ctx.setLineDash([]);
					ctx.strokeStyle = css('--bad');
					ctx.lineWidth = 1.5 * ratio;
					ctx.beginPath();
					ctx.arc(x, y, 4 * ratio, 0, 7);
					ctx.stroke();
				}
			}
		}
		ctx.setLineDash([]);
		ctx.strokeStyle = css('--bad');
		for (const { curve } of this.drawn().filter((each) => each.curve)) {
			for (const at of curve.bad) {
				const x = plot.valToPos(at, 'x', true);
				if (isInside(at)) line(ctx, x, bbox.top + bbox.height - 7 * ratio, x, bbox.top + bbox.height, 2 * ratio);
			}
		}
		ctx.restore();
		this.placeMarkers(plot, shown);
		if (this.card.dataset.state !== 'painted' && this.drawn().every((each) => each.curve)) {
			this.card.dataset.state = 'painted';
			performance.mark(`painted ${this.spec.key}`);
		}
	}

	// Neighbours share a button: the worst of them gives the sign.
	placeMarkers(plot, events) {
		const places = new Map();
		for (const event of events.sort((a, b) => a.x - b.x)) {
			const place = Math.round(plot.valToPos(event.x, 'x') / MARKER_WIDTH);
			const known = places.get(place);
			if (!known) places.set(place, { event, count: 1 });
			else {
				known.count += 1;
				if (event.rank < known.event.rank) known.event = event;
			}
		}
		const sign = JSON.stringify([...places].map(([, { event, count }]) => [Math.round(plot.valToPos(event.x, 'x')), event.run, event.i, count]));
		if (sign === this.markerSign && this.markers?.isConnected) return;
		this.markerSign = sign;
		const held = document.activeElement;
		const known = new Map([...(this.markers?.children ?? [])].map((each) => [each.title, each]));
		const buttons = [...places.values()].map(({ event, count }) => {
			const label = `${kindName(event.kind)}, ${t('step')} ${event.step}${count > 1 ? ` (+${count - 1})` : ''}`;
			const data = { kind: event.kind, step: event.step };
			const button = known.get(label) ?? h('button', { class: `marker ${event.tone}`, title: label, 'aria-label': label, tabIndex: -1, data }, event.sign);
			button.style.left = `${plot.valToPos(event.x, 'x')}px`;
			button.onclick = () => this.card.dispatchEvent(new CustomEvent('marker', { detail: event, bubbles: true }));
			return button;
		});
		if (buttons.length && !buttons.some((each) => each.tabIndex === 0)) buttons[0].tabIndex = 0;
		this.markers ??= h('div', { class: 'markers', role: 'group', 'aria-label': t('events'), onkeydown: (event) => this.stepMarker(event) });
		this.markers.replaceChildren(...buttons);
		if (this.markers.parentNode !== plot.over) plot.over.append(this.markers);
		if (buttons.includes(held)) held.focus();
	}

	// Tab reaches the first one, the arrows the others.
	stepMarker(event) {
		const to = { ArrowLeft: 'previousSibling', ArrowRight: 'nextSibling' }[event.key];
		const next = to && event.target[to];
		if (!next) return;
		event.stopPropagation();
		event.preventDefault();
		event.target.tabIndex = -1;
		next.tabIndex = 0;
		next.focus();
	}

	// ---- values ----

	makeLegend() {
		this.values = new Map();
		const items = this.drawn().map((line) => {
			const [what, value, range] = [span('range'), h('b'), span('range')];
			this.values.set(line, [what, value, range]);
			return h('li', { title: line.label }, h('i', { vars: { background: line.color } }), span('name', line.label), what, value, range);
		});
		this.legend.replaceChildren(...items);
	}

	// Under the cursor, else the newest: the value as logged (of several points in one place their mean and
	// range), then the smoothed one, each by its name.
	showValues() {
		const left = this.plot?.cursor.left ?? -1;
		const x = left >= 0 ? this.plot.posToVal(left, 'x') : null;
		for (const [line, places] of this.values) {
			const { low, high, mean, smooth, last, ...curve } = line.curve ?? {};
			const at = curve.x ? nearest(curve.x, x) : -1;
			const isMean = x !== null && low?.[at] !== high?.[at];
			const texts = at < 0 ? ['', '–', ''] : [
				isMean ? t('pointMean') : smooth ? t('asLogged') : '',
				number(x === null ? last : mean[at]),
				[isMean && `(${number(low[at])} … ${number(high[at])})`, smooth && `${t('smoothed')} ${number(smooth[at])}`].filter(Boolean).join(' '),
			];
			texts.forEach((text, place) => places[place].textContent !== text && (places[place].textContent = text));
		}
		const shown = x === null ? '' : `${t(state.x)} ${axisValue(state.x, x)}`;
		const place = this.card.querySelector('.at');
		if (place && place.textContent !== shown) place.textContent = shown;
	}

	resize() {
		if (this.plot) this.plot.setSize({ width: this.width, height: this.box.clientHeight || 220 });
	}

	// ---- taking it away ----

	// The plot with a title above and a legend below, on the colour of the page.
	png() {
		const { title, unit } = this.spec;
		const source = this.plot.ctx.canvas;
		const ratio = uPlot.pxRatio;
		const [head, foot, edge] = [34 * ratio, 26 * ratio, 12 * ratio];
		const canvas = h('canvas', { width: source.width + 2 * edge, height: source.height + head + foot });
		const context = canvas.getContext('2d');
		const font = css('--font');
		context.fillStyle = css('--panel');
		context.fillRect(0, 0, canvas.width, canvas.height);
		context.textBaseline = 'middle';
		context.fillStyle = css('--ink');
		context.font = `600 ${14 * ratio}px ${font}`;
		context.fillText(`${title}${unit && ` (${t(unit)})`}${this.isDiff ? ` (${t('diff')})` : ''}`, edge, head / 2);
		context.drawImage(source, edge, head);
		context.font = `${11 * ratio}px ${font}`;
		let x = edge;
		for (const line of this.drawn()) {
			const width = context.measureText(line.label).width;
			if (x + width > canvas.width - edge) break;
			const y = head + source.height + foot / 2;
			context.fillStyle = line.color;
			context.fillRect(x, y - 4 * ratio, 8 * ratio, 8 * ratio);
			context.fillStyle = css('--ink-2');
			context.fillText(line.label, x + 12 * ratio, y);
			x += width + 28 * ratio;
		}
		canvas.toBlob((blob) => {
			const url = URL.createObjectURL(blob);
			save(url, `${fileName(title)}.png`);
			setTimeout(() => URL.revokeObjectURL(url), 10000);
		});
	}

	// Every point, not what was drawn; one file per run.
	csv() {
		for (const id of new Set(this.lines.map((line) => line.run))) {
			const metrics = this.lines.filter(({ run }) => run === id).map(({ metric }) => ['metric', metric]);
			save(`${link('csv', { id })}&${new URLSearchParams(metrics)}`, `${fileName(`${id} ${this.spec.title}`)}.csv`);
		}
	}

	destroy() {
		this.plot?.destroy();
		for (const line of this.lines) domain.ends.delete(`${this.spec.key} ${line.run} ${line.metric}`);
	}
}

function save(url, name) {
	const anchor = h('a', { href: url, download: name });
	document.body.append(anchor);
	anchor.click();
	anchor.remove();
}

const fileName = (title) => title.replace(/[^\p{L}\p{N}._-]+/gu, '-').replace(/^-+|-+$/g, '').slice(0, 80) || 'chart';

const isMove = (type) => /^mouse(move|leave)$/.test(type);
const numbers = (column) => Array.from(column, (value) => (Number.isNaN(value) ? null : value));
const columns = (curve) => ({
	x: Array.from(curve.x), low: numbers(curve.low), high: numbers(curve.high), mean: numbers(curve.mean),
	smooth: curve.smooth ? numbers(curve.smooth) : null, bad: Array.from(curve.bad ?? []),
});
const facts = ({ total, start, end, nonfinite, last }) => ({ total, start, end, nonfinite, last });
const isNumber = (value) => value !== null;

function line(ctx, x0, y0, x1, y1, width) {
	ctx.lineWidth = width;
	ctx.beginPath();
	ctx.moveTo(x0, y0);
	ctx.lineTo(x1, y1);
	ctx.stroke();
}

function nearest(xs, x) {
	if (x === null || !xs.length) return xs.length - 1;
	let [low, high] = [0, xs.length - 1];
	while (low < high) {
		const middle = (low + high) >> 1;
		if (xs[middle] < x) low = middle + 1;
		else high = middle;
	}
	return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}
