// Package rates compares the speed of the same work in several places with the speed in
// one reference place (the measure). The work is cut into parts, which are done by turns.
package rates

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// A Part is a piece of work in one place.
type Part struct {
	Round   int // parts of different rounds are never compared
	Form    string
	Epoch   int
	Block   int
	Place   string
	Samples int     // done
	Seconds float64 // duration of the part
	Waited  float64 // time without data
}

// A Row is the speed of a place as a share of the measure's speed, in one form and epoch.
type Row struct {
	Form    string
	Epoch   int
	Place   string
	Ratio   float64 // of samples per second
	Error   float64 // standard error of Ratio
	Pairs   int     // number of compared parts
	PerSec  float64 // samples per second
	Measure float64 // of the measure
	Waited  float64 // share of the time without data
}

// Below reports that the ratio is less than an aim by more than twice its standard error,
// so that chance does not explain the difference.
func (r Row) Below(aim float64) bool { return r.Ratio+2*r.Error < aim }

func (r Row) String() string {
	return fmt.Sprintf("%-6s epoch %d  %-9s %6.0f/s of %6.0f/s: %.4f ± %.4f (%d pairs), waiting %.2f %%", r.Form, r.Epoch, r.Place, r.PerSec, r.Measure, r.Ratio, r.Error, r.Pairs, 100*r.Waited)
}

// Compare returns a row for each place except the measure. The ratio is the geometric
// mean of the ratios of parts done next to each other: a slowness of the machine that
// lasts longer than a part slows both. Errors: a part has no counterpart, or there are no
// parts.
func Compare(parts []Part, measure string) ([]Row, error) {
	type key struct {
		round int
		form  string
		epoch int
		block int
	}
	measured := map[key]Part{}
	for _, p := range parts {
		if p.Samples <= 0 || p.Seconds <= 0 {
			return nil, fmt.Errorf("a part of no samples or no time: %+v", p)
		}
		if p.Place == measure {
			measured[key{p.Round, p.Form, p.Epoch, p.Block}] = p
		}
	}
	type group struct {
		form  string
		epoch int
		place string
	}
	logs, rows := map[group][]float64{}, map[group]*Row{}
	seconds, ours := map[group]float64{}, map[group]float64{}
	samples := map[group]int{}
	for _, p := range parts {
		if p.Place == measure {
			continue
		}
		m, ok := measured[key{p.Round, p.Form, p.Epoch, p.Block}]
		if !ok || m.Samples != p.Samples {
			return nil, fmt.Errorf("nothing like it was measured in %s: %+v", measure, p)
		}
		g := group{p.Form, p.Epoch, p.Place}
		if rows[g] == nil {
			rows[g] = &Row{Form: p.Form, Epoch: p.Epoch, Place: p.Place}
		}
		logs[g] = append(logs[g], math.Log(m.Seconds/p.Seconds))
		samples[g] += p.Samples
		ours[g] += p.Seconds
		seconds[g] += m.Seconds
		rows[g].Waited += p.Waited
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("of %d parts none is to be compared with %s", len(parts), measure)
	}
	var all []Row
	for g, r := range rows {
		mean, err := meanAndError(logs[g])
		r.Ratio, r.Pairs = math.Exp(mean), len(logs[g])
		r.Error = r.Ratio * err
		r.PerSec, r.Measure = float64(samples[g])/ours[g], float64(samples[g])/seconds[g]
		r.Waited /= ours[g]
		all = append(all, *r)
	}
	slices.SortFunc(all, func(a, b Row) int {
		return cmp.Or(cmp.Compare(a.Form, b.Form), cmp.Compare(a.Epoch, b.Epoch), cmp.Compare(a.Place, b.Place))
	})
	return all, nil
}

// meanAndError returns the mean of numbers and its standard error, which is infinite for
// a single number.
func meanAndError(all []float64) (mean, err float64) {
	n := float64(len(all))
	for _, x := range all {
		mean += x / n
	}
	if n < 2 {
		return mean, math.Inf(1)
	}
	squares := 0.0
	for _, x := range all {
		squares += (x - mean) * (x - mean)
	}
	return mean, math.Sqrt(squares / (n - 1) / n)
}
