package kube

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"

	"penstock.io/penstock/meta"
)

// Pod is as much of a pod as tells which volumes it has, and where.
type Pod struct {
	Metadata Object `json:"metadata"`
	Spec     struct {
		NodeName string      `json:"nodeName"`
		Volumes  []PodVolume `json:"volumes"`
	} `json:"spec"`
	Status struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

// Ended tells that no container of a pod runs, nor will.
func (p *Pod) Ended() bool { return p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed" }

// Object is what all objects are known by.
type Object struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// PodVolume is one of a pod's volumes: a claim's, one that is claimed for the pod, or one
// that the pod brings along.
type PodVolume struct {
	Name                  string `json:"name"`
	PersistentVolumeClaim *struct {
		ClaimName string `json:"claimName"`
	} `json:"persistentVolumeClaim"`
	Ephemeral *struct{} `json:"ephemeral"`
	CSI       *struct {
		Driver string `json:"driver"`
	} `json:"csi"`
}

// Claim is the name of the claim behind a pod's volume; "": there is none.
func (v *PodVolume) Claim(pod string) string {
	switch {
	case v.PersistentVolumeClaim != nil:
		return v.PersistentVolumeClaim.ClaimName
	case v.Ephemeral != nil:
		return pod + "-" + v.Name
	}
	return ""
}

// PersistentVolume is as much of one as tells whose it is.
type PersistentVolume struct {
	Metadata Object `json:"metadata"`
	Spec     struct {
		ClaimRef *Object `json:"claimRef"`
		CSI      *struct {
			Driver string `json:"driver"`
		} `json:"csi"`
	} `json:"spec"`
}

// VolumeAttachment says that a node has a volume, or is to have it.
type VolumeAttachment struct {
	Metadata Object `json:"metadata"`
	Spec     struct {
		Attacher string `json:"attacher"`
		NodeName string `json:"nodeName"`
		Source   struct {
			PersistentVolumeName string `json:"persistentVolumeName"`
		} `json:"source"`
	} `json:"spec"`
}

// Pods lists those of all namespaces.
func (a *API) Pods(ctx context.Context) ([]Pod, error) { return list[Pod](ctx, a, "/api/v1/pods") }

// PersistentVolumes lists all.
func (a *API) PersistentVolumes(ctx context.Context) ([]PersistentVolume, error) {
	return list[PersistentVolume](ctx, a, "/api/v1/persistentvolumes")
}

// VolumeAttachments lists all.
func (a *API) VolumeAttachments(ctx context.Context) ([]VolumeAttachment, error) {
	return list[VolumeAttachment](ctx, a, "/apis/storage.k8s.io/v1/volumeattachments")
}

// listed is how many objects are asked for at a time: a page is below maxAnswer unless
// objects are unusually large, and then it is asked for in smaller ones.
const listed = 100

// list asks for all objects of a kind, page by page. Errors: AccessDenied, Unavailable
// (also if the list changed too long ago to go on with it: it is to be asked for anew),
// Protocol.
func list[T any](ctx context.Context, a *API, path string) (all []T, err error) {
	limit, next := listed, ""
	for {
		q := url.Values{"limit": {strconv.Itoa(limit)}}
		if next != "" {
			q.Set("continue", next)
		}
		var page struct {
			Metadata struct {
				Continue string `json:"continue"`
			} `json:"metadata"`
			Items []json.RawMessage `json:"items"`
		}
		err := a.ask(ctx, http.MethodGet, path+"?"+q.Encode(), nil, &page)
		if meta.KindOf(err) == meta.Protocol && limit > 1 { // longer than an answer may be
			limit /= 4
			limit = max(limit, 1)
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, item := range page.Items {
			var x T
			if err := json.Unmarshal(item, &x); err != nil {
				return nil, meta.E("ask the API server", meta.Protocol, path, err)
			}
			all = append(all, x)
		}
		if next = page.Metadata.Continue; next == "" {
			return all, nil
		}
	}
}
