// Package waits has a test that fails as often as a file has bytes.
package waits

import (
	"bytes"
	"os"
	"testing"
)

func TestWaits(t *testing.T) {
	name := os.Getenv("VERDICT_FAILS")
	left, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if left = bytes.TrimSpace(left); len(left) > 0 {
		if err := os.WriteFile(name, left[1:], 0o600); err != nil {
			t.Fatal(err)
		}
		t.Error("nothing came within a minute")
	}
}

func TestFine(t *testing.T) { t.Log("nobody asks") }
