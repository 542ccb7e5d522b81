package main

import (
	"strings"
	"testing"

	"penstock.io/penstock"
)

// TestNotComplete: a command that waited in vain for a round prints the obstacle.
func TestNotComplete(t *testing.T) {
	for _, x := range []struct {
		now  penstock.Mirror
		want string
	}{
		{penstock.Mirror{Heard: 2}, "no process has begun it"},
		{penstock.Mirror{Heard: 2, Round: &penstock.MirrorRound{}}, "the round before it is under way"},
		{penstock.Mirror{Heard: 3, Round: &penstock.MirrorRound{}}, "it is under way"},
		{penstock.Mirror{Heard: 4, Round: &penstock.MirrorRound{}}, "it is under way"},
		{penstock.Mirror{Heard: 2, Round: &penstock.MirrorRound{}, Error: "the disk is full"}, "the disk is full"},
	} {
		if got := notComplete(&x.now, 3, "t"); !strings.HasPrefix(got, x.want) {
			t.Errorf("%+v: %q, want %q", x.now, got, x.want)
		}
	}
}
