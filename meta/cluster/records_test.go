package cluster

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// TestRecordsHoldNoSecrets: checkpoints have the records for a restore and no secret; a
// record of an unknown kind is in no checkpoint.
func TestRecordsHoldNoSecrets(t *testing.T) {
	cli := client(t)
	c := join(t, cli)
	ctx := t.Context()
	keys, err := c.CapKeys(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.AddToken(ctx, TokenRecord{ID: "one", Role: peer.Client, Hash: "hash of a token"}, time.Hour); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Enrol(ctx, Member{Role: peer.Client, Name: "lab"}, false); err != nil {
		t.Fatal(err)
	}
	if _, err := c.CreateVolume(ctx, "data", meta.Policy{Replicas: 1}, 1); err != nil {
		t.Fatal(err)
	}
	secrets := [][]byte{[]byte(encode(keys[0].Secret)), []byte("hash of a token"), []byte("sealed-key"), []byte("unheard-of")}
	for key, value := range map[string]string{"authority": `{"v":1,"authority":"sealed-key"}`, "tokens/unleased": "hash of a token", "novel/1": "unheard-of", "volumes/00000001/log/1": "entry"} {
		if _, err := cli.Put(ctx, c.prefix+"/"+key, value); err != nil {
			t.Fatal(err)
		}
	}
	leaks := func() (found []string) {
		t.Helper()
		all, err := c.Records(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"members/client/lab", "names/data", "counters/volume"} {
			if !slices.ContainsFunc(all, func(r Record) bool { return r.Key == want }) {
				t.Fatalf("%s is not kept: %v", want, all)
			}
		}
		for _, r := range all {
			for _, s := range secrets {
				if bytes.Contains(r.Value, s) {
					found = append(found, r.Key)
				}
			}
		}
		return found
	}
	if l := leaks(); l != nil {
		t.Fatalf("secrets would be written into chunks: %v", l)
	}
	// The check notices a secret that a wider list would let out.
	was := slices.Clone(recordKinds)
	t.Cleanup(func() { recordKinds = was })
	for _, kind := range []string{"capkeys", "authority", "tokens/"} {
		recordKinds = slices.Clone(was)
		i := slices.IndexFunc(recordKinds, func(k recordKind) bool { return k.key == kind })
		recordKinds[i].kept = true
		if leaks() == nil {
			t.Errorf("%s among what is kept, and nobody notices", kind)
		}
	}
}

// TestEveryRecordHasAKind: every key that this package writes has a row in recordKinds,
// which says whether checkpoints have the record.
func TestEveryRecordHasAKind(t *testing.T) {
	literal := regexp.MustCompile(`(?:prefix *\+ *"|"%s)/([a-z]+)(/?)`)
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range literal.FindAllSubmatch(b, -1) {
			seen++
			if _, ok := kindOf(string(m[1]) + string(m[2])); !ok {
				t.Errorf("%s writes %s, which no row of recordKinds names", name, m[0])
			}
		}
	}
	if seen < 8 {
		t.Errorf("only %d keys were found", seen)
	}
}
