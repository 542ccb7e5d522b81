package rates

import (
	"math"
	"math/rand/v2"
	"testing"
)

// parts makes three rounds of ten blocks. Ours takes slower times as long as the measure,
// on a machine whose speed changes from block to block, and by noise from part to part.
func parts(slower, noise float64) (all []Part) {
	r := rand.New(rand.NewPCG(1, 2))
	for round := range 3 {
		for block := range 10 {
			machine := 1 + 4*r.Float64()
			for place, factor := range map[string]float64{"local": 1, "ours": slower} {
				seconds := machine * factor * (1 + noise*(2*r.Float64()-1))
				all = append(all, Part{Round: round, Form: "files", Epoch: 1, Block: block, Place: place, Samples: 1000, Seconds: seconds, Waited: seconds / 4})
			}
		}
	}
	return all
}

func TestCompare(t *testing.T) {
	for _, c := range []struct {
		slower, noise float64
		below         bool // of 0.99
	}{
		{1, 0.01, false},
		{1.005, 0.01, false},
		{1.03, 0.01, true},
		{1.03, 0.5, false}, // too much noise for a verdict
		{1.5, 0.1, true},
	} {
		rows, err := Compare(parts(c.slower, c.noise), "local")
		if err != nil || len(rows) != 1 {
			t.Fatal(rows, err)
		}
		r := rows[0]
		if r.Below(0.99) != c.below || math.Abs(r.Ratio-1/c.slower) > 4*r.Error+1e-9 || math.Abs(r.Waited-0.25) > 1e-9 || r.Pairs != 30 {
			t.Errorf("%v times as slow, noise %v: %v", c.slower, c.noise, r)
		}
	}
}

func TestCompareRefuses(t *testing.T) {
	all := parts(1, 0)
	other := all[0]
	other.Round = 7
	for name, wrong := range map[string][]Part{
		"nothing":       nil,
		"one place":     {{Place: "local", Samples: 1, Seconds: 1}},
		"no other half": {other, {Place: "x", Round: 7, Samples: 1, Seconds: 1}},
		"no time":       {{Place: "local", Samples: 1}},
	} {
		if rows, err := Compare(wrong, "local"); err == nil {
			t.Errorf("%s: %v", name, rows)
		}
	}
	if rows, err := Compare([]Part{{Place: "local", Samples: 1, Seconds: 1}, {Place: "ours", Samples: 1, Seconds: 2}}, "local"); err != nil || rows[0].Ratio != 0.5 || rows[0].Below(0.99) {
		t.Errorf("one pair alone can't tell: %v %v", rows, err)
	}
}
