package policy

import (
	"errors"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

func TestClassParameters(t *testing.T) {
	c, err := ReadClass(map[string]string{
		"replicas": "3", "class": "nvme", "topology": "/dc1/r1", "topologyLevel": "rack", "spread": "rack", "inodes": "1000", "encrypt": "true",
		"sealOnClose": "true", "minReplicas": "1", "localFirst": "false", "volumeNamePrefix": "gold-", "compression": "zstd", "maxChunk": "64Mi", "trash": "24h", "advisoryQuota": "800Gi", "advisoryInodes": "900",
		"csi.storage.k8s.io/pvc/name": "data", "csi.storage.k8s.io/pvc/namespace": "team", "csi.storage.k8s.io/pv/name": "pvc-1",
	}, map[string]string{"replicas": "2", "noatime": "true", "compression": "s2", "trash": "90m", "advisoryQuota": "0"}, "pvc-1")
	want := Class{Level: Rack, Prefix: "gold-", AttachPath: "/kubernetes/team/data", Terms: Terms{Compression: meta.CompressS2, TrashSeconds: 5400, AdvisoryInodes: 900, Policy: meta.Policy{MaxChunk: 64 << 20, Replicas: 2, Class: "nvme", Topology: "/dc1/r1", Spread: meta.SpreadRack,
		QuotaInodes: 1000, Encrypt: true, SealOnClose: true, MinReplicas: 1, NoAtime: true}}}
	if err != nil || c != want {
		t.Errorf("%+v, %v; want %+v", c, err, want)
	}
	if c, err := ReadClass(nil, nil, "v"); err != nil || c != (Class{Terms: Terms{Policy: meta.Policy{Replicas: 1, LocalFirst: true}}}) {
		t.Errorf("without parameters: %+v, %v", c, err)
	}
}

func TestWrongParameters(t *testing.T) {
	for _, p := range []map[string]string{
		{"replicas": "0"}, {"replicas": "17"}, {"replicas": "-1"}, {"replicas": ""}, {"replicas": "two"},
		{"class": ""}, {"class": "NVMe"}, {"class": "../x"}, {"topology": "dc1"}, {"topology": "/../x"}, {"topology": "/a//b"},
		{"topologyLevel": "shelf"}, {"spread": "planet"}, {"inodes": "-3"}, {"minReplicas": "-1"}, {"minReplicas": "all"}, {"minReplicas": "2"}, {"replicas": "3", "minReplicas": "4"}, {"encrypt": "1"}, {"compression": "gzip"}, {"compression": ""}, {"compression": "ZSTD"},
		{"maxChunk": "1Mi"}, {"maxChunk": "2Gi"}, {"maxChunk": "-4Mi"}, {"maxChunk": ""}, {"trash": "24"}, {"trash": "-1h"}, {"trash": "1500ms"}, {"trash": "99999h"}, {"trash": ""}, {"trash": "1d"},
		{"advisoryQuota": "80%"}, {"advisoryQuota": "-1"}, {"advisoryInodes": "1k"}, {"advisoryInodes": ""}, {"volumeNamePrefix": "inline-"},
		{"volumeNamePrefix": "../"}, {"volumeNamePrefix": strings.Repeat("p", 33)}, {"quota": "1G"}, {"Replicas": "1"}, {"subDir": "../../etc"},
	} {
		if c, err := ReadClass(p, nil, "v"); !errors.Is(err, meta.Invalid) {
			t.Errorf("%v: %+v, %v; want Invalid", p, c, err)
		}
	}
	for _, p := range []map[string]string{{"encrypt": "true"}, {"sealOnClose": "true"}, {"attachPath": "/a/{volume}"}, {"nope": "1"}, {"replicas": "99"}, {"compression": "lz4"}, {"topologyLevel": "rack"}} {
		if c, err := ReadClass(nil, p, "v"); !errors.Is(err, meta.Invalid) {
			t.Errorf("changing %v: %+v, %v; want Invalid", p, c, err)
		}
	}
}

// TestValuesAreNotTold: no error contains a parameter's value, whatever the user writes, since
// errors are logged and kept in events.
func TestValuesAreNotTold(t *testing.T) {
	const secret = "Hunter2=4f1c!"
	refused := func(what string, err error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s: a secret is taken", what)
		} else if strings.Contains(strings.ToLower(err.Error()), "hunter2") {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, k := range known() {
		_, err := ReadClass(map[string]string{k: secret}, nil, "v")
		refused(k, err)
		_, err = ReadClass(nil, map[string]string{k: secret}, "v")
		refused("changed "+k, err)
		_, err = ReadInline(map[string]string{k: secret})
		refused("inline "+k, err)
	}
	for _, k := range []string{claimName, claimNamespace, volumeOfClaim} {
		p := map[string]string{claimName: "c", claimNamespace: "n", volumeOfClaim: "v", "attachPath": "/k/{namespace}/{claim}/{volume}"}
		p[k] = secret
		_, err := ReadClass(p, nil, "v")
		refused(k, err)
	}
	_, err := ReadInline(map[string]string{"size": secret})
	refused("size", err)
	_, err = MountOptions([]string{"password=" + secret}, false)
	refused("a mount option", err)
	refused("a class of snapshots", SnapshotParameters(map[string]string{"k": secret}))
}

// Names that users choose stay one part of the path.
func TestAttachPathsDoNotEscape(t *testing.T) {
	type call struct{ template, namespace, claim, want string } // want "": refused
	for _, c := range []call{
		{"", "team", "data", "/kubernetes/team/data"},
		{"none", "team", "data", ""},
		{"/pods/{namespace}/{claim}", "team", "data.v2", "/pods/team/data.v2"},
		{"/pods/{volume}", "team", "data", "/pods/pvc-1"},
		{"/pods/x-{namespace}-{claim}", "..", "data", "!"},
		{"/pods/{namespace}.{claim}", "a", "b", "/pods/a.b"},
		{"/k/{namespace}/{claim}", "..", "data", "!"},
		{"/k/{namespace}/{claim}", "../..", "etc", "!"},
		{"/k/{namespace}/{claim}", "a/b", "c", "!"},
		{"/k/{namespace}/{claim}", "a\x00", "c", "!"},
		{"/k/{namespace}/{claim}", ".", "c", "!"},
		{"/k/{namespace}/{claim}", "", "c", "!"},
		{"/k/{namespace}/{claim}", "{claim}", "c", "!"},
		{"/k/{namespace}/{claim}", "a", strings.Repeat("c", 256), "!"},
		{"/k/{namespace}", "a", "c", "!"}, {"/{volume}", "a", "c", "!"}, {"k/{volume}", "a", "c", "!"}, {"/k/../{volume}", "a", "c", "!"}, {"/k/./{volume}", "a", "c", "!"},
		{"//k/{volume}", "a", "c", "!"}, {"/k/{volume}/", "a", "c", "!"}, {"/k/{user}/{volume}", "a", "c", "!"}, {"/k/\n/{volume}", "a", "c", "!"}, {"/k/{volume", "a", "c", "!"},
	} {
		p := map[string]string{claimName: c.claim, claimNamespace: c.namespace, volumeOfClaim: "pvc-1"}
		if c.template != "" {
			p["attachPath"] = c.template
		}
		got, err := ReadClass(p, nil, "pvc-1")
		if c.want == "!" {
			if !errors.Is(err, meta.Invalid) {
				t.Errorf("%+v: attached at %q, %v", c, got.AttachPath, err)
			}
		} else if err != nil || got.AttachPath != c.want {
			t.Errorf("%+v: attached at %q, %v", c, got.AttachPath, err)
		}
	}
}

func TestInline(t *testing.T) {
	p, err := ReadInline(map[string]string{"size": "10Gi", "class": "nvme", EphemeralMark: "true", "csi.storage.k8s.io/pod.name": "p"})
	if want := (Terms{Policy: meta.Policy{Replicas: 1, LocalFirst: true, Class: "nvme", QuotaBytes: 10 << 30}}); err != nil || p != want {
		t.Errorf("%+v, %v", p, err)
	}
	for _, a := range []map[string]string{{"size": "0"}, {"size": "-1"}, {"size": "10XB"}, {"size": "9223372036854775807Ki"}, {"size": ""}, {"replicas": "16"}, {"attachPath": "/etc/{volume}"}, {"topology": "/dc1"}, {"compression": "zstd"}, {"volume": "datasets"}} {
		if p, err := ReadInline(a); !errors.Is(err, meta.Invalid) {
			t.Errorf("%v: %+v, %v", a, p, err)
		}
	}
}

func TestSizes(t *testing.T) {
	for _, c := range []struct {
		required, limit int64
		want            uint64
		kind            meta.Kind
	}{{0, 0, 0, 0}, {5, 0, 5, 0}, {5, 9, 5, 0}, {0, 9, 9, 0}, {9, 5, 0, meta.Range}, {-1, 0, 0, meta.Invalid}, {0, -1, 0, meta.Invalid}} {
		got, err := Size(c.required, c.limit)
		if got != c.want || meta.KindOf(err) != c.kind {
			t.Errorf("%+v: %d, %v", c, got, err)
		}
		if err == nil && !Fits(got, c.required, c.limit) {
			t.Errorf("%+v: %d was chosen and does not fit", c, got)
		}
	}
	if Fits(4, 5, 0) || Fits(10, 5, 9) || Fits(0, 0, 9) || !Fits(0, 5, 0) {
		t.Error("what fits is wrong")
	}
	one := Terms{Policy: meta.Policy{Replicas: 1}}
	if !Same(Terms{Policy: meta.Policy{Replicas: 1, QuotaBytes: 5}}, one) || Same(Terms{Policy: meta.Policy{Replicas: 2}}, one) || Same(Terms{Policy: one.Policy, Compression: meta.CompressS2}, one) {
		t.Error("what is the same is wrong")
	}
}

// labelValue is a valid label value for Kubernetes.
var labelValue = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

func TestSegments(t *testing.T) {
	long := strings.Repeat("r", 64)
	for at, want := range map[string]map[string]string{
		"": nil, "/": nil, "/h": {KeyHost: "h"}, "/z/h": {KeyZone: "z", KeyHost: "h"}, "/z/r/h": {KeyZone: "z", KeyRack: "r", KeyHost: "h"},
		"/z/room/r/h": {KeyZone: "z", KeyRack: "room.r", KeyHost: "h"}, "/z/" + long + "/h": {KeyZone: "z", KeyRack: strings.Repeat("r", 54) + "-c9ea6f42", KeyHost: "h"},
		"/z/-r_/h": {KeyZone: "z", KeyRack: "r-3fce4d82", KeyHost: "h"}, "/z/___/h": {KeyZone: "z", KeyRack: "bda25155", KeyHost: "h"},
	} {
		got := Segments(at, true)
		if !maps.Equal(got, want) {
			t.Errorf("%s: %v, want %v", at, got, want)
		}
		if !Within(at, got) {
			t.Errorf("%s is not where its own labels say", at)
		}
		for k, v := range got {
			if !labelValue.MatchString(v) {
				t.Errorf("%s: the label %s=%s is none", at, k, v)
			}
		}
	}
	if Within("/z/"+long+"x/h", Segments("/z/"+long+"y", false)) {
		t.Error("two racks whose names begin alike are one")
	}
	if got, want := Segments("/z/r", false), (map[string]string{KeyZone: "z", KeyRack: "r"}); !maps.Equal(got, want) {
		t.Errorf("a rack: %v", got)
	}
	for level, want := range map[Level]string{Anywhere: "", Zone: "/z", Rack: "/z/r", Host: "/z/r/h"} {
		if got := Subtree("/z/r/h", level); got != want {
			t.Errorf("level %d: %s", level, got)
		}
	}
	if Under("/z1/r", "/z") || !Under("/z/r", "/z") || !Under("/z", "/z") || !Under("/z", "") || !Under("/z", "/") {
		t.Error("what lies under what is wrong")
	}
}

func TestPlace(t *testing.T) {
	site := func(at string, class string, free uint64) Site {
		return Site{Topology: at, Disks: []Disk{{class, free}}}
	}
	sites := []Site{site("/z1/r1/a", "nvme", 100), site("/z1/r1/b", "nvme", 100), site("/z1/r2/c", "hdd", 500), site("/z2/r1/d", "nvme", 0)}
	seg := func(zone, rack string) map[string]string {
		return map[string]string{KeyZone: zone, KeyRack: rack, "other": "x"}
	}
	for _, c := range []struct {
		name      string
		class     Class
		preferred []map[string]string
		requisite []map[string]string
		bytes     uint64
		want      string
		kind      meta.Kind
	}{
		{name: "nobody asks", class: Class{Level: Rack}, want: ""},
		{name: "the pod's rack", class: Class{Level: Rack}, preferred: []map[string]string{seg("z1", "r2")}, want: "/z1/r2"},
		{name: "its zone", class: Class{Level: Zone}, preferred: []map[string]string{seg("z1", "r2")}, want: "/z1"},
		{name: "the next best has room", class: Class{Level: Rack}, preferred: []map[string]string{seg("z2", "r1"), seg("z1", "r1")}, bytes: 150, want: "/z1/r1"},
		{name: "full", class: Class{Level: Rack}, requisite: []map[string]string{seg("z1", "r1")}, bytes: 300, kind: meta.NoSpace},
		{name: "two replicas need twice the room", class: Class{Level: Rack, Terms: Terms{Policy: meta.Policy{Replicas: 2}}}, requisite: []map[string]string{seg("z1", "r1")}, bytes: 150, kind: meta.NoSpace},
		{name: "another class of disks", class: Class{Level: Rack, Terms: Terms{Policy: meta.Policy{Class: "nvme"}}}, requisite: []map[string]string{seg("z1", "r2")}, kind: meta.NoSpace},
		{name: "no such rack", class: Class{Level: Rack}, requisite: []map[string]string{seg("z1", "r9")}, kind: meta.NoSpace},
		{name: "the class's zone holds", class: Class{Level: Rack, Terms: Terms{Policy: meta.Policy{Topology: "/z1"}}}, preferred: []map[string]string{seg("z2", "r1"), seg("z1", "r1")}, want: "/z1/r1"},
		{name: "the class is narrower", class: Class{Level: Zone, Terms: Terms{Policy: meta.Policy{Topology: "/z1/r2"}}}, preferred: []map[string]string{seg("z1", "r2")}, want: "/z1/r2"},
		{name: "anywhere", class: Class{}, preferred: []map[string]string{seg("z9", "r9")}, want: ""},
		{name: "anywhere, but the class says where", class: Class{Terms: Terms{Policy: meta.Policy{Topology: "/z1"}}}, preferred: []map[string]string{seg("z1", "r1")}, want: "/z1"},
		{name: "the class says elsewhere", class: Class{Terms: Terms{Policy: meta.Policy{Topology: "/z1"}}}, requisite: []map[string]string{seg("z2", "r1")}, kind: meta.NoSpace},
	} {
		got := c.class
		err := Place(&got, sites, c.preferred, c.requisite, c.bytes)
		if meta.KindOf(err) != c.kind || err == nil && got.Policy.Topology != c.want {
			t.Errorf("%s: %q, %v; want %q, %v", c.name, got.Policy.Topology, err, c.want, c.kind)
		}
	}
	for _, c := range []struct {
		p    meta.Policy
		want uint64
	}{
		{meta.Policy{Replicas: 2, Class: "nvme", Topology: "/z1"}, 100},
		{meta.Policy{Replicas: 4}, 175},
		{meta.Policy{Replicas: 5}, 0},                                                 // the sites have four hosts
		{meta.Policy{Replicas: 3, Spread: meta.SpreadRack}, 700 / 3},                  // and three racks
		{meta.Policy{Replicas: 3, MinReplicas: 1, Spread: meta.SpreadDC}, 0},          // in two zones
		{meta.Policy{Replicas: 1, Class: "tape"}, 0},                                  // of other disks
		{meta.Policy{Replicas: 1, Topology: "/z3"}, 0},                                // and no third zone
		{meta.Policy{Replicas: 2, Class: "hdd"}, 0},                                   // one host has such disks
		{meta.Policy{Replicas: 2, Spread: meta.SpreadRack, Topology: "/z1"}, 700 / 2}, // full or not
	} {
		if got := Capacity(sites, c.p); got != c.want {
			t.Errorf("capacity %d for %+v, want %d", got, c.p, c.want)
		}
	}
	// Place waits for an absent site: new data begins with fewer replicas until then.
	away := slices.Clone(sites)
	away[0] = Site{Topology: "/z1/r1/a", Disks: []Disk{{Class: "nvme"}}, Away: true}
	if got := Capacity(away, meta.Policy{Replicas: 4}); got != 150 {
		t.Errorf("capacity %d while one of four is away", got)
	}
	// The capacity is exactly the bytes for which Place finds room, for any disks of the pod's
	// own machine.
	for _, at := range []map[string]string{nil, seg("z1", "r1"), seg("z1", "r2"), seg("z2", "r1"), seg("z9", "r9"), {KeyZone: "z1", KeyRack: "r1", KeyHost: "b"}} {
		for _, level := range []Level{Anywhere, Zone, Rack, Host} {
			for _, topology := range []string{"", "/z1", "/z1/r2"} {
				class := Class{Level: level, Terms: Terms{Policy: meta.Policy{Topology: topology, Replicas: 2}}}
				var asked []map[string]string
				if at != nil {
					asked = append(asked, at)
				}
				room := Room(class, sites, at)
				fits := func(bytes uint64) bool {
					c := class
					err := Place(&c, sites, asked, nil, bytes)
					// Place does not look for room where the room changes nothing.
					return err == nil && Capacity(sites, c.Policy) >= bytes
				}
				if room > 0 && !fits(room) || fits(room+1) {
					t.Errorf("at %v, class %+v: room for %d, but that many fit: %v, and one more: %v", at, class, room, fits(room), fits(room+1))
				}
			}
		}
	}
}

func TestMountOptions(t *testing.T) {
	got, err := MountOptions([]string{"noatime", "exec"}, true)
	if want := []string{"exec", "noatime", "nodev", "nosuid", "ro"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	if got, err := MountOptions([]string{"suid"}, false); err != nil || slices.Contains(got, "nosuid") {
		t.Errorf("%v, %v", got, err)
	}
	for _, f := range []string{"dev", "cluster=evil:1", "dir=/", "credentials=/etc", "log=/etc/passwd", "insecure", "allow_other", "nonempty", "", "ro,dev", "x-a", "context=x", "bind", "remount"} {
		if got, err := MountOptions([]string{f}, false); !errors.Is(err, meta.Invalid) {
			t.Errorf("%q: %v, %v", f, got, err)
		}
	}
}
