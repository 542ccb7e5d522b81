package handle

import (
	"errors"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

func TestHandlesComeBack(t *testing.T) {
	c := ClusterOf("3f0e")
	for _, v := range []Volume{{Cluster: c, Volume: 1}, {Cluster: c, Volume: meta.MaxVolume}, {Name: "imagenet"}, {Name: "imagenet", Snapshot: "v3"}} {
		got, err := ParseVolume(v.String())
		if err != nil || got != v {
			t.Errorf("%s: %+v, %v; want %+v", v, got, err, v)
		}
		if len(v.String()) > 128 {
			t.Errorf("%s is longer than the specification allows", v)
		}
	}
	s := Snapshot{Cluster: c, Volume: 77, At: 1<<32 - 2}
	if got, err := ParseSnapshot(s.String()); err != nil || got != s {
		t.Errorf("%s: %+v, %v", s, got, err)
	}
	for _, name := range []string{"a", "nightly", strings.Repeat("n", maxPlain), strings.Repeat("n", 128), "a-b", "ü"} {
		g := Group{Cluster: c, ID: 1<<64 - 2, Name: NameOf("", name)}
		if got, err := ParseGroup(g.String()); err != nil || got != g {
			t.Errorf("%s: %+v, %v", g, got, err)
		}
		if len(g.String()) > 128 {
			t.Errorf("%s is longer than the specification allows", g)
		}
	}
}

// Handles of every earlier form are read for ever: volumes outlive programs.
func TestHandlesOfVersion1(t *testing.T) {
	if v := (Volume{Cluster: ClusterOf("c"), Volume: 31}).String(); v != "v1-2e7d2c03-00001f-fe6de813" {
		t.Errorf("the handle of volume 31 is %s now", v)
	}
	if s := (Snapshot{Cluster: ClusterOf("c"), Volume: 31, At: 3}).String(); s != "s1-2e7d2c03-00001f-00000003-42311d84" {
		t.Errorf("the handle of snapshot 3 is %s now", s)
	}
	if g := (Group{Cluster: ClusterOf("c"), ID: 0x4d65822107fcfd52, Name: "csi-nightly"}).String(); g != "g1-2e7d2c03-4d65822107fcfd52-csi-nightly-d4547d0d" {
		t.Errorf("the handle of a group is %s now", g)
	}
}

func TestBadHandles(t *testing.T) {
	good := Volume{Cluster: ClusterOf("c"), Volume: 31}.String()
	for i := range good { // a wrong digit
		b := []byte(good)
		b[i] ^= 1
		if v, err := ParseVolume(string(b)); err == nil {
			t.Errorf("%s is taken for %+v", b, v)
		}
	}
	for _, s := range []string{
		"", "-", "v1", "reallyfakevolumeid", "name=", "name=@", "name=a@", "name=@b", "name=..", "name=a/b", "name=a:b", "name=a@b/c", "name=a@..", "name=a b",
		strings.ToUpper(good), good + "-", " " + good, good + "\n", "../" + good, Snapshot{Cluster: ClusterOf("c"), Volume: 31, At: 1}.String(),
		sealed("v1-2e7d2c03-000000"), sealed("v1-2e7d2c03-1f"), sealed("v2-2e7d2c03-00001f"), sealed("v1-2e7d2c03-00001f-1"), sealed("v1-..-00001f"),
		strings.Repeat("x", 1<<16),
	} {
		if v, err := ParseVolume(s); !errors.Is(err, meta.Invalid) {
			t.Errorf("%.40q: %+v, %v; want Invalid", s, v, err)
		}
	}
	group := Group{Cluster: ClusterOf("c"), ID: 2, Name: "csi-a"}.String()
	for i := range group {
		b := []byte(group)
		b[i] ^= 1
		if v, err := ParseGroup(string(b)); err == nil {
			t.Errorf("%s is taken for %+v", b, v)
		}
	}
	for _, s := range []string{"", good, "g1", "reallyfakegroupid", sealed("g1-2e7d2c03-2-csi-a"), sealed("g1-2e7d2c03-0000000000000002"), sealed("g1-2e7d2c03-0000000000000002-"), sealed("g1-2e7d2c03-0000000000000002-a/b"), sealed("g1-x-0000000000000002-a"), sealed("g2-2e7d2c03-0000000000000002-a")} {
		if v, err := ParseGroup(s); !errors.Is(err, meta.Invalid) {
			t.Errorf("%q: %+v, %v; want Invalid", s, v, err)
		}
	}
	for _, s := range []string{"", good, group, "s1", sealed("s1-2e7d2c03-00001f"), sealed("s1-2e7d2c03-00001f-3")} {
		if v, err := ParseSnapshot(s); !errors.Is(err, meta.Invalid) {
			t.Errorf("%q: %+v, %v; want Invalid", s, v, err)
		}
	}
}

func TestNames(t *testing.T) {
	seen := map[string]string{}
	for _, n := range []string{"pvc-1", "PVC-1", "a/b", "a b", "..", ".", "a@b", "a:b", "ü", strings.Repeat("n", 128), strings.Repeat("n", 127), "x.abc"} {
		got := NameOf("", n)
		if old, twice := seen[got]; twice {
			t.Errorf("%q and %q are both %q", old, n, got)
		}
		seen[got] = n
		if err := checkName(got); err != nil || len(got) > 100 || !strings.HasPrefix(got, Made) {
			t.Errorf("%q becomes %q: %v", n, got, err)
		}
	}
	if got := NameOf("gold-", "pvc-1"); got != "csi-gold-pvc-1" {
		t.Error(got)
	}
	for _, p := range []string{"../", "a/b", strings.Repeat("p", 33), "a\x00", "inline-", "inline-gold-"} {
		if CheckPrefix(p) == nil {
			t.Errorf("prefix %q is taken", p)
		}
	}
	// No handle of this driver's controller looks like an inline volume's handle.
	for _, c := range [][2]string{{"", "inline-1"}, {"inline", "-1"}, {"in", "line-1"}, {"inline", "1"}, {"gold-", "inline-1"}} {
		if err := CheckPrefix(c[0]); err != nil {
			t.Error(err)
		}
		if got := NameOf(c[0], c[1]); strings.HasPrefix(got, Inline) || checkName(got) != nil {
			t.Errorf("%q is called %q", c, got)
		}
	}
	if d := DraftOf("csi-a"); !IsDraft(d) || IsDraft("csi-a") || checkName(d) == nil || IsDraft(NameOf("", "a~")) {
		t.Errorf("a draft %q can be taken for a volume", d)
	}
	if InlineName("n1", "csi-1") == InlineName("n2", "csi-1") {
		t.Error("two nodes' inline volumes share a name")
	}
	// The digests of these two nodes' names begin with the same four bytes.
	const n1, n2 = "worker-62661", "worker-112079"
	if InlinePrefix(n1) == InlinePrefix(n2) {
		t.Errorf("%s and %s share their volumes' names: %q", n1, n2, InlinePrefix(n1))
	}
	holders := map[string]bool{}
	for _, h := range []string{Holder("n1", "v", "/s"), Holder("n2", "v", "/s"), Holder("n1", "v", "/t"), Holder("n1", "w", "/s"), Holder("a,b=c", "v", "/s"), Holder(strings.Repeat("n", 300), "v", "/s")} {
		// The handle is an option of a mount.
		if checkName(h) != nil || len(h) > 200 || holders[h] {
			t.Errorf("a holder %q", h)
		}
		holders[h] = true
	}
}

func FuzzParse(f *testing.F) {
	f.Add(Volume{Cluster: ClusterOf("c"), Volume: 31}.String())
	f.Add(Snapshot{Cluster: ClusterOf("c"), Volume: 31, At: 3}.String())
	f.Add(Group{Cluster: ClusterOf("c"), ID: 2, Name: "csi-a"}.String())
	f.Add("name=a@b")
	f.Fuzz(func(t *testing.T, s string) {
		if v, err := ParseVolume(s); err == nil && v.String() != s {
			t.Errorf("%q was read as %q", s, v)
		}
		if v, err := ParseSnapshot(s); err == nil && v.String() != s {
			t.Errorf("%q was read as %q", s, v)
		}
		if v, err := ParseGroup(s); err == nil && v.String() != s {
			t.Errorf("%q was read as %q", s, v)
		}
	})
}
