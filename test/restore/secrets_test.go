package restore

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/port"
	"penstock.io/penstock/test/program"
)

// command runs the binary and waits for its end.
func (r *rig) command(args ...string) string {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 60*time.Second)
	defer cancel()
	b, err := exec.CommandContext(ctx, program.Path, args...).CombinedOutput()
	if err != nil {
		r.t.Fatalf("%v: %v\n%s", args, err, b)
	}
	return strings.TrimSpace(string(b))
}

func (r *rig) path(parts ...string) string {
	return filepath.Join(append([]string{r.dir}, parts...)...)
}

// secret is data that must lie on no chunk server and in no answer.
type secret struct {
	what  string
	bytes []byte
}

// in returns the form in which a secret stands in b; "": it does not.
func (s secret) in(b []byte) string {
	for form, x := range map[string][]byte{
		"as it is": s.bytes, "in hexadecimal": []byte(hex.EncodeToString(s.bytes)), "in base64": []byte(base64.StdEncoding.EncodeToString(s.bytes)),
	} {
		if bytes.Contains(b, x) {
			return form
		}
	}
	return ""
}

// secrets reads a cluster's secrets from a stopped etcd and from the credentials.
func (r *rig) secrets(token string) (all []secret) {
	t := r.t
	t.Helper()
	e, err := embedded.Start(embedded.Config{Dir: r.path("m", "etcd"), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	got, err := e.Client().Get(t.Context(), "/penstock/default/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	creds, err := peer.Load(r.path("cred", "meta"), nil)
	if err != nil {
		t.Fatal(err)
	}
	key, err := creds.ClusterKey()
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := peer.ParseToken(token)
	if err != nil {
		t.Fatal(err)
	}
	all = []secret{{"the cluster key", key}, {"a join token", []byte(parsed.Secret)}, {"a join token's hash", []byte(parsed.SecretHash())}}
	for _, kv := range got.Kvs {
		switch strings.TrimPrefix(string(kv.Key), "/penstock/default/") {
		case "capkeys":
			var rec struct{ Keys []meta.CapKey }
			if err := json.Unmarshal(kv.Value, &rec); err != nil {
				t.Fatal(err)
			}
			for _, k := range rec.Keys {
				all = append(all, secret{"a capability key", k.Secret})
			}
		case "authority":
			var rec struct {
				Sealed peer.Sealed `json:"authority"`
			}
			if err := json.Unmarshal(kv.Value, &rec); err != nil {
				t.Fatal(err)
			}
			a, err := rec.Sealed.Open(key)
			if err != nil {
				t.Fatal(err)
			}
			der, err := a.PrivateKey()
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, secret{"the authority's private key", der}, secret{"the authority's sealed key", rec.Sealed.Key})
		}
	}
	if len(all) < 6 {
		t.Fatalf("only %d secrets are known", len(all))
	}
	return all
}

// dump returns all answers of a metadata server to an administrator.
func (r *rig) dump() []byte {
	t := r.t
	t.Helper()
	var b bytes.Buffer
	r.api(func(ctx context.Context, c *admin.Client) error {
		for v, err := range c.EachVolume(ctx, &admin.ListVolumesRequest{}) {
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, "%+v", v)
		}
		status, err := c.Health.GetServerStatus(ctx, &admin.GetServerStatusRequest{})
		if err != nil {
			return err
		}
		health, err := c.Health.GetServerHealth(ctx, &admin.GetServerHealthRequest{})
		if err != nil {
			return err
		}
		nodes, err := c.Nodes.ListNodes(ctx, &admin.ListNodesRequest{})
		if err != nil {
			return err
		}
		repair, err := c.Nodes.GetRepairStatus(ctx, &admin.GetRepairStatusRequest{})
		if err != nil {
			return err
		}
		tokens, err := c.Grants.ListJoinTokens(ctx, &admin.ListJoinTokensRequest{})
		if err != nil {
			return err
		}
		members, err := c.Grants.ListMembers(ctx, &admin.ListMembersRequest{})
		if err != nil {
			return err
		}
		grants, err := c.Grants.ListGrants(ctx, &admin.ListGrantsRequest{})
		if err != nil {
			return err
		}
		settings, err := c.Grants.GetSettings(ctx, &admin.GetSettingsRequest{})
		fmt.Fprintf(&b, "%v %v %v %v %v %v %v %v", status, health, nodes, repair, tokens, members, grants, settings)
		return err
	})
	web := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", r.path("m", "admin.sock"))
	}}}
	defer web.CloseIdleConnections()
	for _, page := range []string{"metrics", "healthz", "readyz", "debug/pprof/goroutine?debug=2", "debug/pprof/heap", "debug/pprof/cmdline"} {
		re, err := web.Get("http://penstock/" + page)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(&b, re.Body); err != nil {
			t.Fatal(err)
		}
		re.Body.Close()
	}
	return b.Bytes()
}

// TestSecretsStayWhereTheyAre: in a cluster with certificates, the checkpoints on the disks of
// chunk servers, the answers to administrators and the logs have no secret. The authority is in
// no checkpoint, and is there again all the same after etcd is lost.
func TestSecretsStayWhereTheyAre(t *testing.T) {
	r := newBareRig(t)
	addr := port.Free(t)
	r.command("cluster", "init", "--dir", r.metaDir(), "--credentials", r.path("cred"))
	start := func() {
		r.meta = r.run("meta", "--dir", r.metaDir(), "--listen", addr, "--credentials", r.path("cred", "meta"))
		r.until("the metadata server answers", func() error {
			return exec.Command(program.Path, "cluster", "members", "--cluster", addr, "--credentials", r.path("cred", "admin")).Run()
		})
	}
	start()
	join := func(role, name string) {
		token := r.command("cluster", "join-token", "--role", role, "--cluster", addr, "--credentials", r.path("cred", "admin"))
		if err := os.WriteFile(r.path("token"), []byte(token), 0o600); err != nil {
			t.Fatal(err)
		}
		r.command("cluster", "join", "--cluster", addr, "--name", name, "--credentials", r.path("cred", name), "--token-file", r.path("token"))
	}
	join("chunkserver", "c1")
	chunks := r.run("chunkserver", "--data", r.path("c"), "--cluster", addr, "--listen", "127.0.0.1:0", "--credentials", r.path("cred", "c1"))
	connected := func() error {
		if r.connected() == 0 {
			return fmt.Errorf("none is there")
		}
		return nil
	}
	r.until("a chunk server", connected)
	token := r.command("cluster", "join-token", "--role", "client", "--cluster", addr, "--credentials", r.path("cred", "admin"))
	c := r.client()
	write(t, c, "root", "/one")
	r.checkpoint("root")
	dump := r.dump()
	closing, stop := context.WithTimeout(context.Background(), 5*time.Second)
	defer stop()
	c.Close(closing)
	r.meta.Kill()

	secrets := r.secrets(token)
	log, err := os.ReadFile(r.path("log"))
	if err != nil {
		t.Fatal(err)
	}
	for what, b := range map[string][]byte{"what administrators are told": dump, "the log": log} {
		for _, s := range secrets {
			if form := s.in(b); form != "" {
				t.Errorf("%s stands in %s, %s", s.what, what, form)
			}
		}
	}
	files, known := 0, false
	if err := filepath.WalkDir(r.path("c"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		files++
		// Control: the search finds a record that may be there.
		known = known || bytes.Contains(b, []byte("members/chunkserver/c1"))
		for _, s := range secrets {
			if form := s.in(b); form != "" {
				t.Errorf("%s stands in %s, %s", s.what, path, form)
			}
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if !known {
		t.Errorf("in none of %d files are the cluster's records: is this a checkpoint?", files)
	}

	// etcd is lost; the credentials of the metadata server have the authority.
	if err := os.RemoveAll(r.path("m", "etcd")); err != nil {
		t.Fatal(err)
	}
	aside := r.path("cred", "meta", "authority.sealed")
	restore := []string{"--yes", "--listen", addr, "--credentials", r.path("cred", "meta"), "--chunkservers", "1"}
	if err := os.Rename(aside, r.path("aside")); err != nil {
		t.Fatal(err)
	}
	if _, text, err := r.restore(restore...); err == nil || !strings.Contains(text, "authority.sealed") {
		t.Fatal("a cluster that nobody could join any more was made", text, err)
	}
	if err := os.Rename(r.path("aside"), aside); err != nil {
		t.Fatal(err)
	}
	if _, text, err := r.restore(restore...); err != nil {
		t.Fatal(text, err)
	}
	start()
	join("client", "later")
	r.until("the chunk server again", connected)
	fresh := r.client()
	check(t, fresh, "root", "/one")
	fresh.Close(closing)
	chunks.Kill()
}
