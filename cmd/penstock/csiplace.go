package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/kube"
	"penstock.io/penstock/meta"
)

// placeWait bounds the requests for a node's labels; placeAgain is the pause between two
// tries.
const (
	placeWait  = 30 * time.Second
	placeAgain = time.Second
)

// placeFlags are the flags of `penstock csi place`.
type placeFlags struct {
	logFlags
	name   string
	labels []string
	file   string
}

func newCSIPlace() *cobra.Command {
	var p placeFlags
	cmd := &cobra.Command{
		Use:   "place",
		Short: "Write the place of a Kubernetes node, taken from its labels, to a file",
		Long: `Asks Kubernetes for the labels of a node, and writes the node's place into a file
that 'penstock csi --topology-file' reads. The command runs in a pod before the node
agent; the pod's service account may get nodes. So the agent needs no access to
Kubernetes, and starts while the API server is away.

--labels names the labels from the widest: the zone's, then the rack's. The place is
made of the values of these labels, up to the first label that the node lacks, and of
the node's name: /ZONE/RACK/NODE. If the node lacks the first label, the file says
"none", and a chunk server on the machine, if there is one, says the place.

If Kubernetes does not answer, an earlier file stays as it is.`,
		Example: `  penstock csi place --node-name "$NODE_NAME" --labels topology.kubernetes.io/zone,example.com/rack \
      --file /var/lib/penstock-csi/topology`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := p.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if p.name == "" || p.file == "" || len(p.labels) == 0 {
				return usagef("say which node, by which labels, and where to write it: --node-name, --labels, --file")
			}
			api, err := kube.InPod(kube.AccountDir, os.Getenv)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), placeWait)
			defer cancel()
			return p.write(ctx, api, log)
		},
	}
	p.logFlags.add(cmd)
	f := cmd.Flags()
	f.StringVar(&p.name, "node-name", "", "the node's name")
	f.StringSliceVar(&p.labels, "labels", nil, "names of the node's labels that describe its place, from the widest")
	f.StringVar(&p.file, "file", "", "file that is written")
	return cmd
}

// write asks for the node's labels until ctx ends, and replaces the file atomically. Without
// an answer, write keeps an existing file.
func (p *placeFlags) write(ctx context.Context, api *kube.API, log *slog.Logger) error {
	labels, err := api.NodeLabels(ctx, p.name)
	for meta.KindOf(err) == meta.Unavailable && ctx.Err() == nil {
		log.Warn("the node's labels can't be read from Kubernetes", "node", p.name, "err", err)
		select {
		case <-time.After(placeAgain):
			labels, err = api.NodeLabels(ctx, p.name)
		case <-ctx.Done():
		}
	}
	if err != nil {
		// Keep the earlier place and start: pods may use mounts that wait for the agent.
		if _, serr := os.Stat(p.file); serr == nil {
			log.Error("the node's labels can't be read from Kubernetes: the node keeps the place that its labels named last", "node", p.name, "err", err)
			return nil
		}
		return err
	}
	at, err := placeByLabels(labels, p.labels, p.name)
	if err != nil {
		log.Warn("the node's labels do not say all of its place", "node", p.name, "place", at, "err", err)
	}
	if err := writePlace(p.file, at); err != nil {
		return err
	}
	log.Info("noted where the node stands", "node", p.name, "place", at, "file", p.file)
	return nil
}

// noPlace is the file's content for a node without a place in its labels. An empty file is not
// valid, because a crash may have truncated the file.
const noPlace = "none"

// writePlace replaces the file with a node's place, "" for no place. The replacement is
// atomic, also across a power failure.
func writePlace(file, at string) error {
	if at == "" {
		at = noPlace
	}
	tmp := file + ".new"
	w, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = w.WriteString(at + "\n")
	if err = errors.Join(err, w.Sync(), w.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp, file); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// placeByLabels returns a node's place by its labels. want lists the names of the labels, the
// widest first. The place ends before the first missing label; the place is "" if the first
// label is missing. Errors: Invalid, together with the place if the labels give a place.
func placeByLabels(have map[string]string, want []string, node string) (at string, err error) {
	const op = "place of node"
	for _, name := range want {
		if have[name] == "" {
			err = meta.E(op, meta.Invalid, node, fmt.Errorf("it has no label %s", name))
			break
		}
		at += "/" + have[name]
	}
	if at == "" {
		return "", err
	}
	at += "/" + node
	if bad := meta.CheckTopology(at); bad != nil {
		return "", errors.Join(err, bad)
	}
	return at, err
}

// readPlace reads a file written by writePlace; "": the node's labels give no place. Errors:
// Invalid (also for an empty file), and the errors of os.ReadFile.
func readPlace(file string) (at string, err error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	at = strings.TrimSpace(string(b))
	if at == noPlace {
		return "", nil
	}
	if at == "" {
		return "", meta.E("read place", meta.Invalid, file, fmt.Errorf("it is empty; one that says %s stands for no place", noPlace))
	}
	if err := meta.CheckTopology(at); err != nil {
		return "", fmt.Errorf("%s: %w", filepath.Base(file), err)
	}
	return at, nil
}
